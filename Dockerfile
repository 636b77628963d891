# The service with the shipped bundle.  PyPI's torch wheels carry the CUDA libraries, so one image serves on a
# GPU and on a CPU.  docs/deploy.md says how to build a smaller one for CPUs alone.
#
# The stages are cut so that a change of the code, or of a tool's options in pyproject.toml, rebuilds and ships
# kilobytes: gigabytes follow only the list of dependencies and the lock.
ARG BASE=python:3.12-slim

FROM ${BASE} AS list
WORKDIR /src
COPY pyproject.toml ./
RUN python3 -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
    extras = project['optional-dependencies']; \
    print(*project['dependencies'], *extras['onnx'], *extras['fast'], *extras['gpu'], sep='\n')" > direct.txt

FROM ${BASE} AS dependencies
ARG TORCH_INDEX=""
WORKDIR /src
RUN python3 -m venv /opt/psc
COPY --from=list /src/direct.txt ./
COPY requirements.lock ./
RUN /opt/psc/bin/pip install --no-cache-dir --disable-pip-version-check --constraint requirements.lock \
    ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} --requirement direct.txt

FROM dependencies AS code
COPY pyproject.toml LICENSE ./
COPY psc_core psc_core
COPY app app
RUN /opt/psc/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps --prefix /code .

FROM ${BASE} AS bundles
COPY artifacts/dirty-mnist-resnet18 /bundles/dirty-mnist-resnet18
RUN chmod -R a+rX /bundles

FROM ${BASE}
ARG REVISION=""
LABEL org.opencontainers.image.title="psc" \
    org.opencontainers.image.description="Image classifiers served with honest uncertainty" \
    org.opencontainers.image.revision="${REVISION}"
RUN useradd --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin psc
COPY --from=dependencies /opt/psc /opt/psc
COPY --from=bundles /bundles /bundles
COPY --from=code /code /opt/psc
USER 10001:10001
ENV PATH=/opt/psc/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    ORT_DISABLE_TELEMETRY=1 \
    PSC_HOST=0.0.0.0 \
    PSC_PORT=8000 \
    PSC_BUNDLE=/bundles/dirty-mnist-resnet18
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=120s \
    CMD ["python3", "-m", "app.healthcheck"]
ENTRYPOINT ["psc-serve"]
