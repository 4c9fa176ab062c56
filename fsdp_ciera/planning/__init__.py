"""Which codec each shard gets: shapes, rates, links, costs and budgets make a plan."""
