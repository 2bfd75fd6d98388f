from covey.rl.cli import main

main()
