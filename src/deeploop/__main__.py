"""`python -m deeploop` is the `deeploop` command; `torchrun -m deeploop` runs it on every rank."""

import sys

from deeploop.cli import main

sys.exit(main())
