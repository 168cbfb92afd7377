"""`python -m peagle`, which torchrun needs."""

from peagle.cli.main import main

if __name__ == "__main__":
    main()
