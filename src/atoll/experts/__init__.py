"""What an expert is: a network as a velocity field, and how it is stored, opened, cached, validated and described."""
