"""`python -m trencadis` is the command `trencadis`."""

from trencadis.cli.main import main

if __name__ == "__main__":
    main()
