"""A model that a server elsewhere serves, over the HTTP interface that OpenAI's made common."""
