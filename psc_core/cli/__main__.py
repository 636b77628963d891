"""``python -m psc_core.cli`` is ``psc-fit``, for launchers such as torchrun."""

import sys

from psc_core.cli.fit import main

sys.exit(main())
