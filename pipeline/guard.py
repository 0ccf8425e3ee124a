"""Waits until whoever started it is gone, and ends the stages it has left. python -m pipeline.guard MARK"""

import sys

from pipeline.graph import end_marked


def main() -> None:
    sys.stdin.buffer.read()  # until the other end of the pipe is closed, by its owner or by the kernel
    end_marked(sys.argv[1])


if __name__ == "__main__":
    main()
