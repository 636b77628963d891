"""``python -m app.healthcheck``: exit with 0 if this container's service is ready, for Docker's ``HEALTHCHECK``.

It asks at the address and port in the environment variables ``PSC_HOST`` and ``PSC_PORT``, by HTTPS if
``PSC_TLS_CERTIFICATE`` is set.  It imports only the standard library, because it runs every few seconds.
"""

from __future__ import annotations

import os
import ssl
import sys
from typing import Final
from urllib.request import HTTPSHandler, ProxyHandler, build_opener

DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = "8000"
TIMEOUT_SECONDS: Final = 2.0


def is_ready() -> bool:
    """Return whether ``/readyz`` answers 200."""
    scheme = "https" if os.environ.get("PSC_TLS_CERTIFICATE") else "http"
    context = ssl.create_default_context()
    # The certificate is of the service's public name, and this is the same container under another one.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    # Linux connects to 0.0.0.0 and ::, on which a service listens at all addresses, by the loopback interface.
    host = os.environ.get("PSC_HOST") or DEFAULT_HOST
    port = os.environ.get("PSC_PORT", "")
    # Kubernetes sets PSC_PORT=tcp://… for a service named psc, and the service then takes its default.
    port = port if port.isdigit() else DEFAULT_PORT
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/readyz"
    # No proxy, which the environment may name for the service's own requests: it would answer for itself.
    opener = build_opener(ProxyHandler({}), HTTPSHandler(context=context))
    try:
        with opener.open(url, timeout=TIMEOUT_SECONDS) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(0 if is_ready() else 1)
