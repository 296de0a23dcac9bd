"""`python -m rewright`."""

from rewright.cli.main import main

if __name__ == "__main__":
    main()
