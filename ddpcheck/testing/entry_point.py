"""The plugin that pytest knows as `ddpcheck`: it loads `ddpcheck.pytest_plugin`, unless `-p no:ddpcheck` is set."""

pytest_plugins = ["ddpcheck.pytest_plugin"]  # by name: one plugin, also where `-p ddpcheck.pytest_plugin` is set
