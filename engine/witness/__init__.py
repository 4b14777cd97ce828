"""May samples be made elsewhere? What objects hold, and what is known of them."""
