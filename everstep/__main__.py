"""`python -m everstep` is the `everstep` command."""

from everstep.orchestrator.cli import main

if __name__ == "__main__":
    main()
