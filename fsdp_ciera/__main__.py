"""`python -m fsdp_ciera` is `ciera`."""

import sys

from fsdp_ciera.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
