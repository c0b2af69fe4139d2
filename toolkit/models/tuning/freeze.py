"""Training a part of the model itself."""

from transformers import PreTrainedModel

from toolkit.config.schema import TuningConfig
from toolkit.errors import ConfigError
from toolkit.messages import tr
from toolkit.models.tuning.layers import decoder_layers, decoder_layers_name
from toolkit.plan.parameters import check_matches


def freeze(model: PreTrainedModel, config: TuningConfig) -> None:
    """Leave trainable the last layers, and the parameters that the patterns name.

    Raises:
        ConfigError: more layers than there are, or a pattern that matches nothing.
    """
    number = len(decoder_layers(model))
    if config.last_layers > number:
        raise ConfigError(
            tr(
                "tuning.last_layers = {value}, but the model has {number} layers.",
                value=config.last_layers,
                number=number,
            )
        )
    names = [name for name, _ in model.named_parameters()]
    layers = decoder_layers_name(model)
    last = tuple(f"{layers}.{place}." for place in range(number - config.last_layers, number))
    trained = {name for name in names if name.startswith(last)}
    for pattern in config.patterns:
        trained.update(check_matches("tuning.patterns", pattern, names))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
