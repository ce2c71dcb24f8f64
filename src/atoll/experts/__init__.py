"""What an expert is: its network as a velocity field, and how it is opened, cached, validated and described."""
