"""`python -m headprune`, for launchers: `torchrun --nproc-per-node 2 -m headprune score …`."""

from headprune.cli import main

if __name__ == "__main__":
    main()
