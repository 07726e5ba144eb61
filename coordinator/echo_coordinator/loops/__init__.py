"""What the coordinator does again and again: feed, train, publish, evaluate, report. `coordinator` starts them."""
