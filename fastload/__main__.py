"""`python -m fastload`: the command line, or a script."""

from fastload.cli import main

if __name__ == "__main__":
    main()
