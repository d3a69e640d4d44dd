"""`python -m dualmesh`: the command line, where no script is on the path."""

from dualmesh.cli import main

if __name__ == "__main__":
    main()
