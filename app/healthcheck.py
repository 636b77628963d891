"""``python -m app.healthcheck``: exit with 0 if this container's service is ready, for Docker's ``HEALTHCHECK``.

It asks at the port in the environment variable ``PSC_PORT``, by HTTPS if ``PSC_TLS_CERTIFICATE`` is set.  It imports
only the standard library, because it runs every few seconds.
"""

from __future__ import annotations

import os
import ssl
import sys
import urllib.request
from typing import Final

DEFAULT_PORT: Final = "8000"
TIMEOUT_SECONDS: Final = 2.0


def is_ready() -> bool:
    """Return whether ``/readyz`` answers 200."""
    scheme = "https" if os.environ.get("PSC_TLS_CERTIFICATE") else "http"
    context = ssl.create_default_context()
    # The certificate is of the service's public name, and this is the same container under another one.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    port = os.environ.get("PSC_PORT", "")
    # Kubernetes sets PSC_PORT=tcp://… for a service named psc, and the service then takes its default.
    url = f"{scheme}://127.0.0.1:{port if port.isdigit() else DEFAULT_PORT}/readyz"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS, context=context) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(0 if is_ready() else 1)
