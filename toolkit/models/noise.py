"""NEFTune: noise on the embeddings of training rows (Jain et al., 2023, arXiv 2310.05914)."""

from transformers import PreTrainedModel
from transformers.integrations.neftune import neftune_post_forward_hook


def add_noise(model: PreTrainedModel, alpha: float) -> None:
    """Add uniform noise to what the input embedding gives in training mode; evaluation is left alone.

    transformers' own hook (5.23): of up to alpha / sqrt(S x H) for rows of S tokens, padding included, and hidden
    width H. What is drawn follows from the rank's random state, as dropout does, so that a resumed run goes on alike.

    Args:
        model: as it will be trained.
        alpha: size of the noise, above 0.
    """
    embedding = model.get_input_embeddings()
    embedding.neftune_noise_alpha = alpha
    embedding.register_forward_hook(neftune_post_forward_hook)
