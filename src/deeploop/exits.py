"""The exit codes of `deeploop`, which a sweep decides by, and the error that has one of its own.

0    done, or saved when asked to stop
1    some of the work failed (cells of a sweep), or a defect of ours, with a traceback
2    a mistake in what was asked for or in a file: one line on stderr
75   a device's memory is full: one line too; beside fewer neighbours the same command may work
130  interrupted, or cells of a sweep are left: the same command goes on
"""

MISTAKE = 2
OUT_OF_MEMORY = 75  # EX_TEMPFAIL of sysexits.h: worth another try
INTERRUPTED = 130


class OutOfDeviceMemory(RuntimeError):
    """A device has no memory left; the message says what to try."""
