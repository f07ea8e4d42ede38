"""Codes and scales in files: every order of them is read, and those that do not fit are refused."""

import itertools
import json

import numpy as np
import pytest

from manualpar.models.pretrained.tensor_files import open_tensor_files, quantization_of

FP8 = {"quant_method": "fp8", "weight_block_size": [4, 4]}
MXFP4 = {"quant_method": "mxfp4"}
ONE = 0x38  # The code of 1 in float8_e4m3fn.
FACTORS = np.array([[1, 2], [4, 8]], np.float32)
CODES = ("F8_E4M3", [8, 8], bytes([ONE]) * 64)
SCALES = ("F32", [2, 2], FACTORS.tobytes())
BLOCKS, EXPONENTS = ("U8", [1, 2, 1, 16], bytes([0x22]) * 32), ("U8", [1, 2, 1], bytes([127, 128]))


def write(directory, tensors):
    """Writes one file, with the tensors (name, (dtype, shape, bytes)) in this order."""
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors:
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += content
    text = json.dumps(header).encode()
    length = len(text).to_bytes(8, "little")
    (directory / "model.safetensors").write_bytes(length + text + data)


def opened(directory, config):
    return open_tensor_files(directory, quantization_of({"quantization_config": config}))


def whole(files, name):
    return files.read(name, tuple(slice(0, size) for size in files.shapes[name]))


TENSORS = (("w", CODES), ("w_scale_inv", SCALES), ("b", ("F32", [1], bytes(4))))


@pytest.mark.parametrize("order", list(itertools.permutations(TENSORS)))
def test_scales_may_come_before_or_after_their_codes(tmp_path, order):
    write(tmp_path, order)
    files = opened(tmp_path, FP8)
    assert files.shapes == {"w": (8, 8), "b": (1,)}
    assert files.dtypes == {"w": "bfloat16", "b": "float32"}
    np.testing.assert_array_equal(whole(files, "w"), np.kron(FACTORS, np.ones((4, 4))))


def test_scales_may_be_in_a_later_file(tmp_path):
    places = {}
    for number, (name, tensor) in enumerate(TENSORS):
        write(tmp_path, [(name, tensor)])
        places[name] = f"{number}.safetensors"
        (tmp_path / "model.safetensors").rename(tmp_path / places[name])
    index = {"weight_map": places}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    files = opened(tmp_path, FP8)
    assert files.files["w"] == "0.safetensors"
    np.testing.assert_array_equal(whole(files, "w"), np.kron(FACTORS, np.ones((4, 4))))


def fp8(codes=CODES, scales=SCALES, **more):
    return [("w", codes), ("w_scale_inv", scales), *more.items()]


def mxfp4(blocks=BLOCKS, scales=EXPONENTS, **more):
    return [("w_blocks", blocks), ("w_scales", scales), *more.items()]


def vector(dtype, *shape):
    sizes = {"F8_E4M3": 1, "U8": 1, "F32": 4, "BF16": 2, "I32": 4}
    return dtype, list(shape), bytes(sizes[dtype] * int(np.prod(shape)))


NAN, INFINITE, LARGE = (
    ("F32", [2, 2], np.full((2, 2), x, np.float32).tobytes()) for x in (np.nan, np.inf, 3e38)
)
OF_BLOCKS = r"expected U8\[experts, rows, blocks, 16\]"
OF_ROWS = r"expected F8_E4M3\[rows, columns\]"
REFUSED = {
    "a scalar of fp8": (FP8, fp8(vector("F8_E4M3")), rf"w is F8_E4M3\[\], {OF_ROWS}"),
    "a norm of fp8": (FP8, fp8(vector("F8_E4M3", 16)), rf"w is F8_E4M3\[16\], {OF_ROWS}"),
    "a stack of fp8": (FP8, fp8(vector("F8_E4M3", 2, 8, 8)), rf"w is .*\[2, 8, 8\], {OF_ROWS}"),
    "a scale for the whole": (FP8, fp8(scales=vector("F32")), r"w_scale_inv: float32\[\], expec"),
    "scales of integers": (FP8, fp8(scales=vector("I32", 2, 2)), "w_scale_inv: I32.*, expected bf"),
    "scales of fp8": (
        FP8,
        fp8(scales=vector("F8_E4M3", 2, 2), w_scale_inv_scale_inv=vector("F32", 1, 1)),
        r"w_scale_inv: F8_E4M3\[2, 2\], expected bfloat16 or float32",
    ),
    "no scales": (FP8, fp8()[:1], "has the scales w_scale_inv: None"),
    "blocks of floats": (MXFP4, mxfp4(vector("F32", 1, 2, 1, 16)), rf"w_blocks is .*, {OF_BLOCKS}"),
    "a scalar block": (MXFP4, mxfp4(vector("U8")), rf"w_blocks is U8\[\], {OF_BLOCKS}"),
    "blocks of 8": (MXFP4, mxfp4(vector("U8", 1, 2, 1, 8)), rf"w_blocks is .*, {OF_BLOCKS}"),
    "five dims": (MXFP4, mxfp4(vector("U8", 1, 1, 2, 1, 16)), rf"w_blocks is .*, {OF_BLOCKS}"),
    "exponents of floats": (MXFP4, mxfp4(scales=vector("F32", 1, 2, 1)), "w_scales: float32.*, ex"),
    "too few exponents": (MXFP4, mxfp4(scales=vector("U8", 1, 2)), r"w_scales: U8\[1, 2\], expect"),
    "codes and the tensor": (MXFP4, mxfp4(w=vector("F32", 1, 32, 2)), "w is .*, expected only its"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("is_reversed", [False, True])
def test_codes_that_cannot_be_decoded_are_refused_by_their_names(tmp_path, name, is_reversed):
    config, tensors, words = REFUSED[name]
    write(tmp_path, tensors[::-1] if is_reversed else tensors)
    with pytest.raises(ValueError, match=rf"model\.safetensors: .*{words}") as caught:
        opened(tmp_path, config)
    assert "Fetch" in str(caught.value) or "Dequantize" in str(caught.value)


INFINITE_VALUES = {
    "scales of NaN": (FP8, fp8(scales=NAN)),
    "infinite scales": (FP8, fp8(scales=INFINITE)),
    "scales that overflow": (FP8, fp8(("F8_E4M3", [8, 8], bytes([0x7E]) * 64), LARGE)),
    "codes of NaN": (FP8, fp8(("F8_E4M3", [8, 8], bytes([0x7F]) * 64))),
    "exponents that overflow": (MXFP4, mxfp4(scales=("U8", [1, 2, 1], bytes([127, 255])))),
}


@pytest.mark.parametrize("name", INFINITE_VALUES)
def test_codes_that_stand_for_no_number_are_refused(tmp_path, name):
    config, tensors = INFINITE_VALUES[name]
    write(tmp_path, tensors)
    files = opened(tmp_path, config)
    with pytest.raises(ValueError, match=r"model\.safetensors: w.* with the scales w.* or infinit"):
        whole(files, "w")
    write(tmp_path, fp8() if config is FP8 else mxfp4())
    assert np.isfinite(whole(opened(tmp_path, config), "w").astype(np.float32)).all()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("fp8", r"quantization_config is 'fp8', expected an object with quant_method"),
        (["fp8"], r"quantization_config is \['fp8'\], expected an object"),
        (8, r"quantization_config is 8, expected an object"),
        ({"quant_method": ["gptq"]}, r"quant_method is \['gptq'\], expected one of 'mxfp4'"),
        ({"quant_method": {}}, r"quant_method is \{\}, expected one of 'mxfp4'"),
        *(
            (FP8 | {"weight_block_size": size}, "weight_block_size is .*, expected the rows and")
            for size in ("fp8", 128, [128], [0, 1], [1.0, 1], [True, 1], [10**400, 1], {})
        ),
    ],
    ids=str,
)
def test_a_quantization_that_is_not_known_is_refused_by_its_key(config, words):
    with pytest.raises(ValueError, match=words) as caught:
        quantization_of({"quantization_config": config})
    assert len(str(caught.value)) < 400
