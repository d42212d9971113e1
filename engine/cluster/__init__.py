"""Many engines behind one address: what a router and its engines say to each other, and the two actors that say it."""
