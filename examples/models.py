"""The networks that the examples train: MXNet's model zoo by name, and two of CIFAR size."""

from __future__ import annotations

from mxnet import gluon
from mxnet.gluon import nn
from mxnet.gluon.model_zoo import vision
from mxnet.gluon.model_zoo.vision.resnet import BasicBlockV1, ResNetV1

#: The smallest square image, in pixels, that a family of the model zoo takes; 32 for all others.
SMALLEST_IMAGE = {"inception": 299, "densenet": 224, "squeezenet": 224, "alexnet": 64}


def cifar_resnet20(classes: int) -> gluon.HybridBlock:
    """The 20-layer ResNet for 32x32 images (He et al. 2015, section 4.2): 0.27 million weights."""
    return ResNetV1(BasicBlockV1, [3, 3, 3], [16, 16, 32, 64], classes=classes, thumbnail=True)


def cifar_vgg(classes: int) -> gluon.HybridBlock:
    """A small VGG with batch normalisation for 32x32 images.

    Like its big relatives it has most of its weights in the first dense layer, whose
    gradient is ready first and whose weight is needed last: where priority pays.
    """
    net = nn.HybridSequential()
    for channels in (32, 64, 128):
        for _ in range(2):
            net.add(
                nn.Conv2D(channels, 3, padding=1, use_bias=False),
                nn.BatchNorm(),
                nn.Activation("relu"),
            )
        net.add(nn.MaxPool2D())
    net.add(nn.Flatten(), nn.Dense(1024, activation="relu"), nn.Dense(classes))
    return net


OWN = {"cifar_resnet20": cifar_resnet20, "cifar_vgg": cifar_vgg}


def build(name: str, classes: int) -> gluon.HybridBlock:
    """An uninitialised network by name.

    Raises ValueError, listing the names, if neither this file nor the model zoo has it.
    """
    if name in OWN:
        return OWN[name](classes)
    try:
        return vision.get_model(name, classes=classes)
    except ValueError as error:  # the zoo lists its names
        raise ValueError(f"{error}\n\t" + "\n\t".join(sorted(OWN))) from None


def default_image_size(name: str) -> int:
    """A small image size, in pixels, that the network `name` accepts."""
    sizes = (size for family, size in SMALLEST_IMAGE.items() if name.lower().startswith(family))
    return next(sizes, 32)
