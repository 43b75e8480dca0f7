"""`ddpcheck run`, in the process that reports: looks whether the ranks get on, and reports on what they have left."""
