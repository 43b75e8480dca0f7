"""pytest entry point `ddpcheck`: loads `ddpcheck.pytest_plugin`, unless `-p no:ddpcheck` is set."""

pytest_plugins = ["ddpcheck.pytest_plugin"]  # by name: registered once even with `-p ddpcheck.pytest_plugin`
