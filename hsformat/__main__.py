"""``python -m hsformat``: the same as the ``hsformat`` command."""

from hsformat.cli import main

if __name__ == "__main__":
    main()
