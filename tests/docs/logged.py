"""For the walk of a document: ``LOG COUNT`` ends with 0 once a log has so many rows, ``BUNDLE`` tells its version."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from psc_core.log.store import models_in, open_log, read_rows

if __name__ == "__main__":
    if len(sys.argv) == 2:
        print(json.loads(Path(sys.argv[1], "manifest.json").read_text())["version"])
    else:
        log = open_log(sys.argv[1])
        found = sum(batch.num_rows for name in models_in(log) for batch in read_rows(log, name))
        sys.exit(found < int(sys.argv[2]))
