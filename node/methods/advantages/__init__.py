"""How much better a completion did than others. Pure functions of whole batches."""
