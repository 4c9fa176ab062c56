"""What commands do, once their options are read: measure, train or plan, then show and write."""
