"""`python -m balloond.keeper --socket PATH`."""

from balloond.keeper.keeper import main

main()
