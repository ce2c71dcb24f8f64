"""The texts of the page. Text in braces is filled in; [brackets] mark terms of the glossary."""

# Terms that a newcomer may not know. They are explained on hover and at the end of the page.
GLOSSARY = {
    "expert": "A diffusion model that was trained on one cluster only.",
    "router": "A small classifier that predicts which cluster a noisy image comes from.",
    "monolith": "One dense network trained on all clusters: the baseline for the experts.",
    "student": "One dense network, distilled from the trained experts.",
    "merged": "One dense network whose weights are the average of those of the experts.",
    "cluster": "One part of the training images. Each expert is trained on one cluster.",
    "held-out": "Not used for training.",
    "FID": "Frechet distance between generated and real images in Inception features. Lower is better.",
    "KID": "Kernel distance between generated and real images; unbiased for small sets. Lower is better.",
    "precision": "Share of generated images that lie close to real images in feature space. Higher is better.",
    "recall": "Share of real images that lie close to generated images in feature space. Higher is better.",
    "diversity": "Mean perceptual distance between images of one prompt with different noise. Higher is more diverse.",
    "held-out error": "Mean squared error of the predicted velocity on held-out images, with less weight below "
    "t = 0.05. Lower is better.",
    "real-vs-real baseline": "The same metrics between two disjoint sets of real images. They show the bias and noise "
    "of these set sizes.",
    "FLOPs": "Floating-point operations: the amount of computation, independent of the hardware.",
    "flow matching": "Training objective: predict the velocity from data to noise.",
    "DDPM": "Training objective: predict the noise that was added to an image.",
    "guidance scale": "Strength of classifier-free guidance; 1 disables it.",
    "top-1": "Routing: each step uses the most probable expert.",
    "top-2": "Routing: each step uses the two most probable experts, weighted by their probabilities.",
    "full": "Routing: each step uses all experts, weighted by their probabilities.",
}

LEAD = """
This model consists of {experts}. The training data of {data} is divided into clusters, and each [expert] is a diffusion
model, trained on one [cluster]. During training the experts exchanged no data, no gradients and no weights. Combined
with {routing} routing, they generate these images:
"""

METHOD = """
The training images are divided into [cluster]s, and one [expert] is trained on each cluster. The experts do not
communicate, so they can be trained on different machines, at different times and with different objectives. A [router]
is trained separately to predict the cluster of a noisy image. Sampling starts from noise. At each step, the router’s
probabilities are the weights of the experts’ velocities:
"""
EQUATION = "v(xₜ, t) = Σₖ p(k | xₜ, t) · vₖ(xₜ, t)"
BASELINE = "The [monolith] is the baseline: one dense network, trained on all images."

SAME_NOISE = "All images of a column start from the same noise, so you can compare the models directly."
SOME_HELD_OUT = "Prompts marked * are [held-out]; the others belong to training images."
ALL_TRAINED = "All prompts belong to training images, so a model may reproduce memorized images."

ALONE = """
Each row shows one expert alone, without routing. An outline marks prompts from the expert’s cluster. The expert has no
training images for the other prompts, which is why the ensemble needs routing.
"""

CLUSTERS = {
    "features": "Images with similar features in a vision network form a cluster. No labels were used.",
    "labels": "Classes were grouped into clusters.",
    "random": "Images were assigned to clusters at random, as a baseline.",
}

ROUTING = """
Each band shows one image from pure noise (left) to the final image (right). The colors are the router’s probabilities
of the experts at each step.
"""
ROUTER_CONDITIONED = (
    "This router is conditioned on the prompt, so its probabilities are informative from the first step."
)
ROUTER_UNCONDITIONED = "The only input of this router is the noisy image, so pure noise gives no information."

LOSSES = """
Training loss by images seen. Losses of different objectives are not comparable, so each objective has a separate chart.
"""

COSTS = """
Training time is the sum over all networks of a row; the longest single job, in parentheses, is the time with one
machine per network. Training memory is an estimate for the largest job. FLOPs, time and weights per image include all
networks that sampling uses.
"""

SMALL_SETS = """
The Frechet distance of finite sets is biased upward; the real-vs-real baseline shows by how much. Compare metrics
within this table only.
"""

ROUTER = """
The router predicts the correct cluster for {accuracy} of the [held-out] images, averaged over all noise levels. Where
confidence equals accuracy, its probabilities are well calibrated.
"""

HELD_OUT = """
Mean squared error of the predicted velocity on [held-out] images; lower is better. All models are evaluated on the same
noisy images.
"""

MEMORIZED = """
An error above {zero:.1f} is worse than predicting zero velocity: these networks have memorized their training images
and do not generalize to held-out ones. This is common with little data and long training.
"""

MATRIX = """
Error of each expert on the [held-out] images of each cluster. An outline marks the expert of the cluster. If the
experts are specialized, the outlined value is the smallest of its row.
"""

MIXED_OBJECTIVES = """
Compare only experts with the same objective: at high noise the conversion of a DDPM expert to a velocity shrinks its
estimate toward the mean of the data, which lowers its error on other clusters.
"""
