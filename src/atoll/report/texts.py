"""What the page says in words. Text in braces is filled in; [brackets] mark words of the glossary."""

GLOSSARY = {
    "expert": "A diffusion network that was trained on one cluster only.",
    "router": "A small network that looks at a noisy picture and says from which clusters it may come.",
    "monolith": "One ordinary network, trained on all data with as many FLOPs as all experts together.",
    "student": "One network that learned from the finished experts.",
    "cluster": "Pictures that look alike to a vision network; one part of the data.",
    "FID": "Frechet distance between real and made pictures in the features of the Inception network. Lower is better.",
    "KID": "Kernel distance between real and made pictures, unbiased for few samples. Lower is better.",
    "diversity": "Mean distance between pictures of one prompt made from different noise. Higher is more varied.",
    "FLOPs": "Floating-point operations: how much arithmetic it took, whatever the machine.",
    "floor": "What real pictures get when measured against other real ones: as many as were sampled, or half of them.",
    "flow matching": "Training a network to say in which direction to move a noisy picture.",
    "DDPM": "Training a network to say which noise was added to a picture. The older of the two ways.",
    "guidance_scale": "How strongly the prompt is followed.",
    "top-1": "At every step the one expert that the router finds most probable.",
    "top-2": "At every step the two most probable experts, weighted by their probability.",
    "full": "All experts at every step, weighted by their probability.",
}
"""Words that a newcomer may not know; they explain themselves on hover, and at the end of the page."""

LEAD = """
{experts} networks were trained on {experts} different parts of {data}. None saw the others’ part, and they exchanged
nothing. Asked together ({routing} routing), they act as one model, and this is what it makes of these words:
"""

METHOD = """
The pictures are sorted into [cluster]s of things that look alike. Each cluster trains its own [expert]: a diffusion
network that learns to turn noise into such pictures, step by step. The experts can be trained on different machines, at
different times, even in different ways, because they never talk to each other. A [router], a small network, learns to
tell from a noisy picture which clusters it may come from. To make a picture, start with noise; at every step the router
says which experts are to be asked, and their answers, weighted, are the next step. The [monolith] is what one would do
without all this: one network, all the data.
"""

SAME_NOISE = "Every column starts from the same noise, so pictures of one column can be compared."
SOME_UNSEEN = "Prompts marked * were never seen in training; the others are captions of training pictures."
ALL_SEEN = "All prompts are captions of training pictures, so a network may simply remember them."

ALONE = """
An expert answers every prompt with what it knows. Outlined pictures belong to the expert’s own cluster; elsewhere it
guesses. This is why a router is needed.
"""

CLUSTERS = {
    "features": """
A vision network looked at every picture, and pictures that look alike to it went together. Nobody named the parts.
""",
    "labels": "Classes that look alike went together.",
    "random": "The pictures were dealt out at random, for comparison.",
}

ROUTING = """
Each band is one picture on its way from pure noise (left) to the finished picture (right). The colours show how
probable the router finds each expert at that step.
"""
ROUTER_READS = "This router also reads the prompt, so it has an opinion from the start."
ROUTER_LOOKS = "This router sees the noisy picture only, so at the left it cannot know."

LOSSES = """
Each line falls as a network learns. Losses of different kinds measure different things, so each kind has its chart.
"""

COSTS = """
Training seconds add up over all networks of a row; in brackets the longest single job, which is what it takes with one
machine for each. Memory is that of the largest training job, estimated. FLOPs, time and weights of a picture count
all networks that its making needs.
"""

FEW = (
    "Distances of so few pictures are too large, and the floor shows by how much: compare them within this table only."
)

ROUTER = """
On held-out pictures the router names the right cluster in {accuracy} of cases over all times. The more noise, the less
the picture tells. Where confidence and accuracy agree, its probabilities can be trusted.
"""

HELD_OUT = """
Error of the predicted direction on pictures that no training saw; lower is better. All models answer the
same questions.
"""

BY_HEART = """
An error above {nothing:.1f} is worse than no answer at all: on pictures that they have not seen these networks are
lost. They know their training pictures by heart, as small data and long training make them.
"""

MIXED = """
Compare an expert with others of its kind: answers of a DDPM are held back where noise is strong, which errs less on
strange pictures.
"""

MATRIX = """
Each expert’s error on held-out pictures of each cluster. Framed: its own. Where experts have specialised, the framed
number is the smallest of its row.
"""
