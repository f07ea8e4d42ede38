"""The tests that `mutations` runs for each mutant."""

COUNTS = "tests/inspect/expected_bytes_test.py::test_every_row_of_the_table"
STEPS = "tests/laws/strategies_test.py::test_ten_steps_equal_the_single_device"
LAWS = "tests/laws/laws_test.py"
TUPLES = f"{LAWS}::test_a_step_has_the_loss_and_every_gradient_of_one_device"
OF_LAYERS, OF_ROOMS = "tests/refused/layers_test.py", "tests/refused/layer_rooms_test.py"
CONTEXT = (
    "tests/layers/attention/context_test.py",
    "tests/models/transformer_context_test.py",
    OF_ROOMS,
)
STAGES = "tests/layers/pipeline/executor_test.py"
DROPOUT = (
    "tests/core/program/program_test.py"
    "::test_dropout_masks_differ_on_every_example_minibatch_and_step"
)
# The tests of every mutant, in this order.
TESTS = (
    "tests/core/parameters/collectives_test.py",
    "tests/core/mesh/splitting_test.py",
    "tests/core/parameters/sharded_parameter_test.py",
    "tests/refused/core_mesh_test.py",
    "tests/refused/core_parameters_test.py",
    "tests/refused/core_program_test.py",
    COUNTS,
    "tests/core/modes/gradients_test.py",
    TUPLES,
    STEPS,
    LAWS,
    "tests/laws/collections_test.py",
    "tests/core/program/program_test.py::test_masks_that_differ_by_device_and_minibatch",
    "tests/core/program/program_test.py::test_evaluation_is_without_dropout_and_counts_what_the_mask_says",
    DROPOUT,
)
# Tests that run before `TESTS` for mutants with these names, because they probably kill the mutant.
# If several names match, the first one counts.
FIRST = {
    "core.modes.variable_reduction:*": (
        "tests/core/modes/gradients_test.py",
        "tests/laws/collections_test.py",
    ),
    "core.program.step:find_nonfinite*": ("tests/core/program/step_test.py",),
    "quantization.quantized_collectives:*": ("tests/quantization/quantized_collectives_test.py",),
    "quantization.gradient_rounding:*": ("tests/quantization/gradient_rounding_test.py",),
    "strategies.diloco.*": ("tests/strategies/diloco/diloco_test.py",),
    "core.modes.gradients:reduce_gradient:*": ("tests/laws/roles_test.py",),
    "core.mesh.splitting:to_zigzag*": ("tests/laws/roles_test.py",),
    "*:to_zigzag:delete": CONTEXT[1:],
    "models.transformer:*:cumsum:*": CONTEXT[1:],
    "layers.attention.context:*": CONTEXT,
    "layers.attention.blockwise_attention:*": CONTEXT,
    "layers.attention.chunked_attention:*": CONTEXT,
    "core.model.trace_model:*": ("tests/core/model/trace_model_test.py",),
    "core.parameters.annotations:*": (
        "tests/core/parameters/annotations_test.py",
        "tests/layers/dense_test.py",
    ),
    "checks.context_check:*": ("tests/checks/context_check_test.py",),
    "layers.pipeline.executor:*": ("tests/layers/pipeline/executor_test.py", STAGES),
    "layers.pipeline.cut:*": ("tests/layers/pipeline/cut_test.py", STAGES),
    "layers.pipeline.staged_loss:*": ("tests/layers/pipeline/staged_loss_test.py", STAGES),
    "layers.pipeline.*:regather_for_backward:*": ("tests/inspect/pipeline_formulas_test.py",),
    "layers.pipeline.*": (STAGES,),
    "layers.boundaries:*": (
        "tests/layers/boundaries_test.py",
        "tests/layers/dense_test.py",
        OF_LAYERS,
    ),
    "layers.ring:*": ("tests/layers/ring_test.py", OF_LAYERS),
    "layers.moe.moe:*": ("tests/layers/moe/moe_test.py", OF_ROOMS),
    "layers.moe.routing:*": (
        "tests/layers/moe/routing_test.py",
        "tests/layers/moe/moe_program_test.py",
        OF_ROOMS,
    ),
    "layers.*vocabulary*": ("tests/layers/vocabulary_test.py", OF_LAYERS),
    "layers.head_loss:*": ("tests/layers/head_loss_test.py", OF_LAYERS),
    "core.model.interface:*": ("tests/core/model/interface_dropout_test.py",),
    "core.parameters.sharded_parameter:*.to_array:gather_invariant:*": (
        "tests/inspect/expected_bytes_test.py::test_model_axes_are_gathered_too",
        "tests/laws/annotated_models_test.py::test_fsdp_with_a_model_axis_of_any_size",
    ),
    "core.modes.remat:*": ("tests/core/modes/remat_test.py",),
    "core.modes.manual:*:fold_rng_over_axis:*": ("tests/core/modes/manual_test.py",),
    "*:duplicate": (COUNTS,),
    "core.parameters.collectives:gather_invariant:*-ax?s": (TUPLES,),
    "core.parameters.collectives:gather_invariant:*": (STEPS,),
    "core.modes.gradients:*": ("tests/core/modes/gradients_test.py",),
    "by_hand:*:axis_index:*": ("tests/core/parameters/sharded_parameter_test.py",),
    "by_hand:*:gather_params:*": ("tests/core/parameters/sharded_parameter_test.py",),
    "by_hand:gather_params.*": ("tests/core/parameters/sharded_parameter_test.py",),
    "core.model.loops:*": ("tests/core/model/loops_test.py",),
    "core.program.step:*:regather_for_backward:*": (COUNTS,),
    "core.modes.manual:*:sync_collections:*": ("tests/laws/collections_test.py",),
    "core.modes.manual:*-axes": (TUPLES,),
    "core.program.step:*": (STEPS,),
    "core.modes.manual:*": (STEPS,),
    "*:*-axis": (TUPLES,),
    "core.parameters.sharded_parameter:*": (
        "tests/core/parameters/sharded_parameter_test.py",
        STEPS,
    ),
    "by_hand:gather_examples*": ("tests/core/parameters/collectives_test.py",),
    "by_hand:*": ("tests/core/parameters/sharded_parameter_test.py",),
}
