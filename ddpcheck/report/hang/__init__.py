"""What hung in a job that is over, by the dumps that Flight Recorder has left of its ranks: `ddpcheck hang`."""
