"""`torchrun` with exit codes for out-of-memory and for a stop: `python -m deeploop.sweep.torchrun …`.

It takes torchrun's own arguments. torchrun itself exits with 1, whatever the exit codes of its ranks.
"""

import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

from deeploop.exits import OUT_OF_MEMORY, STOPPED


def run() -> int:
    try:
        main()
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        codes = {failure.exitcode for failure in error.failures.values()}
        # The ranks that are not full end too, by torchrun's signal or because a peer is gone.
        return next((code for code in (OUT_OF_MEMORY, *STOPPED) if code in codes), 1)
    return 0


if __name__ == "__main__":
    sys.exit(run())
