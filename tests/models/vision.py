"""Models of torchvision, made small through their constructors where they allow it."""

from __future__ import annotations

from torch import nn

from tests.models.common import Built, Entry, floats


def _classifier(model: nn.Module, size: int) -> Built:
    return model, (floats(2, 3, size, size),), {}


def alexnet() -> Built:
    """Its convolutions as they are; the classifier, otherwise 55 million weights, is narrower."""
    from torchvision.models import AlexNet

    model = AlexNet(num_classes=16)
    model.classifier = nn.Sequential(
        nn.Linear(256 * 6 * 6, 64), nn.ReLU(inplace=True), nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 16)
    )
    return _classifier(model, 64)


def vgg11() -> Built:
    """VGG-11's layers with an eighth of the channels, and a narrow classifier."""
    from torchvision.models.vgg import VGG, make_layers

    layers: list[str | int] = [8, "M", 16, "M", 32, 32, "M", 64, 64, "M", 64, 64, "M"]
    model = VGG(make_layers(layers), num_classes=16, init_weights=False)
    model.classifier = nn.Sequential(nn.Linear(64 * 7 * 7, 64), nn.ReLU(inplace=True), nn.Linear(64, 16))
    return _classifier(model, 32)


def resnet50() -> Built:
    """All 50 layers, with bottlenecks a quarter as wide."""
    from torchvision.models.resnet import Bottleneck, ResNet

    return _classifier(ResNet(Bottleneck, [3, 4, 6, 3], num_classes=16, width_per_group=16), 32)


def resnet_train() -> Built:
    """Two blocks in training mode: batch statistics, running averages."""
    from torchvision.models.resnet import BasicBlock, ResNet

    return _classifier(ResNet(BasicBlock, [1, 1, 1, 1], num_classes=16), 64)


def mobilenet_v3_small() -> Built:
    """Depthwise convolutions, squeeze and excitation."""
    from torchvision.models import mobilenet_v3_small

    return _classifier(mobilenet_v3_small(num_classes=16), 32)


def efficientnet_b0() -> Built:
    """The same kind, with SiLU."""
    from torchvision.models import efficientnet_b0

    return _classifier(efficientnet_b0(num_classes=16), 32)


def shufflenet_v2() -> Built:
    """Channel split and shuffle."""
    from torchvision.models import shufflenet_v2_x0_5

    return _classifier(shufflenet_v2_x0_5(num_classes=16), 32)


def densenet121() -> Built:
    """Every layer reads the concatenation of all before it."""
    from torchvision.models import DenseNet

    return _classifier(DenseNet(8, (6, 12, 24, 16), 16, num_classes=16), 32)


def vit_b_16() -> Built:
    """torch's own multi-head attention inside."""
    from torchvision.models import VisionTransformer

    return _classifier(VisionTransformer(32, 8, 2, 8, 64, 128, num_classes=16), 32)


def swin_t() -> Built:
    """Windows, shifts, a position table by head, all in one function."""
    from torchvision.models import SwinTransformer

    return _classifier(
        SwinTransformer([4, 4], 32, [2, 2], [4, 8], [4, 4], stochastic_depth_prob=0.0, num_classes=16), 32
    )


def convnext_t() -> Built:
    """Depthwise convolutions between permutations."""
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    blocks = [CNBlockConfig(32, 64, 2), CNBlockConfig(64, None, 2)]
    return _classifier(ConvNeXt(blocks, stochastic_depth_prob=0.0, num_classes=16), 32)


_QUICK = (alexnet, vgg11, mobilenet_v3_small, shufflenet_v2, vit_b_16, swin_t, convnext_t)
_LONG = (resnet50, efficientnet_b0, densenet121)
MODELS: dict[str, Entry] = {builder.__name__: Entry(build=builder) for builder in _QUICK}
MODELS.update({builder.__name__: Entry(build=builder, long=True) for builder in _LONG})
MODELS["resnet_train"] = Entry(build=resnet_train, train=True)
