"""`python -m fastload`: the command line."""

from fastload.cli import main

if __name__ == "__main__":
    main()
