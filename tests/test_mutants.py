"""A test counts once it has been seen to fail: each mistake below, put into model.py or sample.py, must make the named test fail.

    python -m pytest -q tests/test_mutants.py

A mistake is a piece of one of the two and what stands there instead. It is never written to disk: the changed source is
executed under the file's name, the test's module is imported anew, and its function called. (mutate.py tries mistakes
that nobody thought of.)
"""
import contextlib
import importlib
import inspect
import itertools
import sys
import types
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
SOURCES = {name: (Path(__file__).parent.parent / f"{name}.py").read_text(encoding="utf-8") for name in ("model", "sample")}
ANEW = ("model", "sample", "tiny", "train")                      # what holds parts of them

MUTANTS = {
    # ---- attention
    "the causal mask is off": (
        "window.causal, dropout)",
        "False, dropout)",
        "test_model::test_a_token_changes_nothing_before_it"),
    "a cached query sees one token ahead": (
        "position_AT.device) <= position_AT[..., None]",
        "position_AT.device) <= position_AT[..., None] + 1",
        "test_cache::test_a_prompt_fed_in_pieces_gives_the_same_logits"),
    "a cached query does not see itself": (
        "position_AT.device) <= position_AT[..., None]",
        "position_AT.device) < position_AT[..., None].clamp(min=1)",
        "test_cache::test_a_few_new_tokens_see_all_ten_stored_ones"),
    "rows of other lengths see each other's padding": (
        "if T > 1 or not (level or span_A):",
        "if T > 1:",
        "test_cache::test_cached_logits_equal_the_full_forward"),
    "RoPE begins again with every piece": (
        "*self.positions.tables(position_BT), real_AC",
        "*self.positions.tables(position_BT - position_BT[:, :1]), real_AC",
        "test_cache::test_a_prompt_fed_in_pieces_gives_the_same_logits"),
    "RoPE turns the other way": (
        "[-turn for turn in turns] + turns",
        "turns + [-turn for turn in turns]",
        "test_references::test_llama_gives_the_logits_of_transformers"),
    "the base period is not the config's": (
        "cfg.rope_theta ** (",
        "10000.0 ** (",
        "test_model::test_other_widths_periods_and_temperatures_equal_the_specification_too"),
    "GELU is the tanh form": (
        'F.gelu(self.up(x_BTD, low.get("up")))',
        "F.gelu(self.up(x_BTD, low.get('up')), approximate='tanh')",
        "test_references::test_gpt2_gives_the_logits_of_transformers"),
    "dropout acts in evaluation": (
        "self.dropout if self.training else 0.0",
        "self.dropout",
        "test_model::test_dropout_acts_in_training_and_never_in_evaluation"),

    # ---- the loop
    "the anchor is forgotten": (
        "return h_BTD, self.update.anchor(e_BTD), self",
        "return h_BTD, self.update.anchor(0 * e_BTD), self",
        "test_model::test_logits_equal_the_specification"),
    "the anchor is forgotten after the first step": (
        "self.step(h_BTD, anchor, who, step",
        "self.step(h_BTD, anchor if step == 0 else self.update.anchor(h_BTD), who, step",
        "test_model::test_logits_equal_the_specification"),
    "the gate's sign is swapped": (
        "torch.lerp(y_BTD.to(g_BTD.dtype), h_BTD.to(g_BTD.dtype), g_BTD)",
        "torch.lerp(h_BTD.to(g_BTD.dtype), y_BTD.to(g_BTD.dtype), g_BTD)",
        "test_model::test_a_gate_forced_open_keeps_the_state_at_any_depth"),
    "the gate adds a residual": (
        "chosen_anchor, noise.on_gate(h_ACD, step))",
        "chosen_anchor, noise.on_gate(h_ACD, step)) + h_ACD",
        "test_model::test_logits_equal_the_specification"),
    "LN_c is left out": (
        "self.joint_norm(torch.cat((self.state_norm(h_BTD), e_BTD), -1))",
        "torch.cat((self.state_norm(h_BTD), e_BTD), -1)",
        "test_model::test_logits_equal_the_specification"),
    "the gate ignores its temperature": (
        "/ self.temperature",
        "/ 1",
        "test_model::test_a_higher_temperature_makes_softer_gates"),
    "the depth asked for is ignored": (
        "for step in range(depth):",
        "for step in range(self.cfg.n_recur):",
        "test_model::test_depth_zero_is_the_coda_on_the_anchor"),
    "sequence is a cycle": (
        "(step * cfg.n_core + j) // cfg.n_recur",
        "(step * cfg.n_core + j) % cfg.n_core",
        "test_model::test_nine_layers_from_three_blocks_in_a_cycle_or_in_sequence"),
    "sharing is untied": (
        "Block(cfg) for _ in range(cfg.n_core)",
        "Block(cfg) for _ in range(cfg.n_core * cfg.n_recur)",
        "test_model::test_sharing_is_by_construction_and_survives_loading_moving_and_copying"),
    "every step runs a copy": (
        "block = self.core[self.block_at(step, j, self.cfg)]",
        "block = __import__('copy').deepcopy(self.core[self.block_at(step, j, self.cfg)])",
        "test_model::test_every_parameter_learns"),
    "the head is untied": (
        "self.embed.weight)\n\n    # ---- public",
        "self.embed.weight.detach())\n\n    # ---- public",
        "test_model::test_the_head_is_the_token_table"),

    "the gate's state turns float32": (
        "return h_new_BTD.to(h_BTD.dtype)",
        "return h_new_BTD",
        "test_model::test_half_precision_weights_give_nearly_the_same_answer"),

    # ---- noise, depth, loss
    "noise in evaluation": (
        "exit_threshold), Silence(), \"last\"",
        "exit_threshold), Noise(self.cfg, 0), \"last\"",
        "test_model::test_evaluation_is_without_noise_and_deterministic_whatever_the_seed"),
    "noise in decoding": (
        "depth, Silence(), cache, watch)",
        "depth, Noise(self.cfg, 0), cache, watch)",
        "test_cache::test_two_hundred_written_tokens_saw_the_logits_of_the_full_forward"),
    "no noise in training": (
        "self.update.read(noise.on_state(h_ACD, step), chosen_anchor)",
        "self.update.read(h_ACD, chosen_anchor)",
        "test_model::test_noise_enters_where_the_specification_says"),
    "the gate sees the noise": (
        "self.update.read(noise.on_state(h_ACD, step), chosen_anchor)",
        "self.update.read(h_ACD := noise.on_state(h_ACD, step), chosen_anchor)",
        "test_model::test_noise_enters_where_the_specification_says"),
    "gate noise differs by feature": (
        "(*h_BTD.shape[:2], 1), self.gate_std",
        "h_BTD.shape, self.gate_std",
        "test_model::test_state_noise_is_drawn_for_every_feature_and_gate_noise_for_every_token"),
    "state noise is the same at every step": (
        '"state", step)',
        '"state", 0)',
        "test_model::test_noise_is_fresh_at_every_step_and_a_function_of_seed_and_step"),
    "gate noise is the same at every step": (
        '"gate", step)',
        '"gate", 0)',
        "test_model::test_noise_is_fresh_at_every_step_and_a_function_of_seed_and_step"),
    "quiet gates get a number and not a tensor": (
        "h_BTD.new_zeros(*h_BTD.shape[:2], 1)",
        "1e-9 * step",
        "test_model::test_another_depth_needs_no_new_graph"),
    "depth never reaches its upper end": (
        "cfg.n_recur + 1, ()",
        "cfg.n_recur, ()",
        "test_model::test_depth_follows_the_shared_seed_and_noise_the_own_one"),
    "depth follows the own seed": (
        "(self.cfg, generator(shared))",
        "(self.cfg, generator(own))",
        "test_model::test_depth_follows_the_shared_seed_and_noise_the_own_one"),
    "targets of -100 are divided by": (
        'return {"ce": total / counts_N.sum()',
        'return {"ce": total / torch.ones_like(counts_N).sum()',
        "test_model::test_loss_is_the_mean_over_the_targets_that_count"),
    "a batch without targets divides by zero": (
        '{"ce": total / counts_N.sum().clamp(min=1)}',
        '{"ce": total / counts_N.sum()}',
        "test_model::test_a_batch_in_which_nothing_counts_has_loss_zero_and_a_legal_gradient"),

    # ---- the fused loss
    "a chunk's gradient replaces the last one's": (
        "dtable_VD.addmm_(d_nV.T, x_nD)",
        "dtable_VD.copy_(d_nV.T @ x_nD)",
        "test_model::test_a_fused_loss_is_the_same_loss_with_the_same_gradients_in_less_memory"),
    "ignored targets have a gradient": (
        "weight_n[:, None] / sum_n1",
        "1 / sum_n1",
        "test_model::test_a_fused_loss_is_the_same_loss_with_the_same_gradients_in_less_memory"),
    "ignored targets are added up": (
        "return (ce_Q * weight_Q).sum(), ce_Q",
        "return ce_Q.sum(), ce_Q",
        "test_model::test_a_fused_loss_is_the_same_loss_with_the_same_gradients_in_less_memory"),
    "the target's own logit has no pull": (
        "z_nV.scatter_add_(1, index_n1, -sum_n1).to(",
        "z_nV.to(",
        "test_model::test_a_fused_loss_is_the_same_loss_with_the_same_gradients_in_less_memory"),
    "the gradient from above is not used": (
        "grad.mul_(scale)",
        "grad",
        "test_model::test_a_fused_loss_is_the_same_loss_with_the_same_gradients_in_less_memory"),
    "all logits are there at once": (
        "max(256, 2**20 // len(table_VD), len(target_N) // 16)",
        "len(target_N)",
        "test_model::test_a_fused_loss_is_the_same_loss_with_the_same_gradients_in_less_memory"),

    # ---- routers
    "capacities are of those who are left": (
        "n_chosen(share, T)",
        "n_chosen(share, by_AC.size(1))",
        "test_routing::test_training_takes_the_capacities_of_the_full_length_each_set_inside_the_last"),
    "the chosen are not put in order": (
        ".indices[:, :k].sort(1).values",
        ".indices[:, :k]",
        "test_routing::test_the_gathered_pass_equals_a_dense_one_that_masks"),
    "chosen tokens begin again at position 0": (
        "position_AC=of(self.position_AC), cos=of(self.cos), sin=of(self.sin)",
        "position_AC=of(self.position_AC), cos=self.cos if self.cos is None else self.cos[:1, : column_LM.size(1)], sin=self.sin if self.sin is None else self.sin[:1, : column_LM.size(1)]",
        "test_routing::test_logits_and_depths_equal_the_specification_at_every_depth"),
    "only the delta is scored": (
        "return h_ACD + score_AC1 * y_ACD",
        "return h_ACD + score_AC1 * (y_ACD - h_ACD)",
        "test_routing::test_logits_and_depths_equal_the_specification_at_every_depth"),
    "one top-k for the whole batch": (
        "by_AC.sort(dim=1, descending=True, stable=True).indices[:, :k]",
        "(by_AC - by_AC.flatten().sort(descending=True).values[k * len(by_AC) - 1]).sort(dim=1, descending=True).indices[:1].expand(len(by_AC), -1)[:, :k]",
        "test_routing::test_the_gathered_pass_equals_a_dense_one_that_masks"),
    "who has stopped goes on": (
        "keep_AC = keep_AC if real_AC is None else keep_AC & real_AC\n",
        "pass\n",
        "test_routing::test_cached_logits_equal_the_full_forward_for_unequal_prompts"),
    "steps share their arrivals": (
        "self.arrived = [[0] * n_rows for _ in range(depth)]",
        "self.arrived = [[0] * n_rows] * depth",
        "test_routing::test_cached_logits_equal_the_full_forward_for_unequal_prompts"),
    "who has stopped stays visible": (
        "for row, new in zip(rows, n_new_A):",
        "for row, new in zip(range(self.n_rows), [C] * self.n_rows):",
        "test_routing::test_cached_logits_equal_the_full_forward_for_unequal_prompts"),
    "rows that stopped are read in place of those that go on": (
        "for row, n in zip(row_A, n_A)]",
        "for row, n in enumerate(n_A)]",
        "test_routing::test_cached_logits_equal_the_full_forward_for_unequal_prompts"),
    "a slot that grows forgets": (
        "[:, :, :n_places] = old.view",
        "[:, :, :1] = old[:, :1].view",
        "test_routing::test_a_cache_that_grows_equals_one_that_was_large"),
    "half of K and V is made again": (
        "if self.who is None:",
        "if True:",
        "test_routing::test_logits_and_depths_equal_the_specification_at_every_depth"),
    "the auxiliary router is never asked": (
        "return logit_AC, aux_AC >= who.threshold, aux_AC",
        "return logit_AC, logit_AC >= who.threshold, aux_AC",
        "test_routing::test_logits_and_depths_equal_the_specification_at_every_depth"),
    "the auxiliary router pulls at the state": (
        "of_step(router.aux_units, step, x_ACD.detach())",
        "of_step(router.aux_units, step, x_ACD)",
        "test_routing::test_an_auxiliary_router_learns_beside_the_model_and_changes_nothing_in_it"),
    "the balancing bias weighs": (
        "self.alpha * p_BTR.gather",
        "self.alpha * (p_BTR + self.bias_R).gather",
        "test_routing::test_logits_and_depths_equal_the_specification_at_every_depth"),
    "the bias favours who has enough": (
        "load_R.double().mean() - load_R",
        "load_R - load_R.double().mean()",
        "test_routing::test_a_balancing_bias_evens_out_the_depths_without_a_loss"),
    "warm capacities do not widen": (
        "self.extra * self.training",
        "0.0 * self.training",
        "test_routing::test_warm_capacities_begin_at_everyone_and_end_as_declared"),
    "warm capacities outlive training": (
        "self.extra * self.training",
        "self.extra",
        "test_routing::test_warm_capacities_begin_at_everyone_and_end_as_declared"),
    "shared K and V are made again": (
        "        return step == 0",
        "        return True",
        "test_routing::test_logits_and_depths_equal_the_specification_at_every_depth"),
    "the threshold counts at step 0": (
        "if isinstance(step, int) and share >= 1:",
        "if isinstance(step, int) and share > 1:",
        "test_routing::test_a_threshold_of_zero_sends_everyone_all_the_way_and_one_sends_nobody_on"),
    "the router's own loss counts three times": (
        "self.cfg.router_weight, aux)",
        "3 * self.cfg.router_weight, aux)",
        "test_routing::test_the_routers_own_losses_are_those_of_plain_loops"),
    "the balancing loss forgets how many depths there are": (
        "balance = self.cfg.n_recur * (",
        "balance = (",
        "test_routing::test_the_routers_own_losses_are_those_of_plain_loops"),
    "the balancing loss pools the batch": (
        "(share_BR * p_BTR.mean(1))",
        "(share_BR.mean(0) * p_BTR.mean((0, 1)))",
        "test_routing::test_the_routers_losses_of_a_batch_are_the_mean_of_its_halves"),
    "the z-loss is not squared": (
        "logits.logsumexp(-1).square()",
        "logits.logsumexp(-1).abs()",
        "test_routing::test_the_routers_own_losses_are_those_of_plain_loops"),
    "token-choice scores every step": (
        "== step + 1)[..., None]",
        ">= 0)[..., None]",
        "test_routing::test_logits_and_depths_equal_the_specification_at_every_depth"),

    # ---- initial values
    "the gate's bias is not applied": (
        "nn.init.constant_(update.gate.down.bias, self.cfg.gate_bias)",
        "pass",
        "test_model::test_a_gate_starts_by_keeping_982_thousandths_of_the_state"),
    "residual outputs are not scaled": (
        "std=0.02 / math.sqrt(2 * self.cfg.executed_blocks())",
        "std=0.02",
        "test_model::test_matrices_start_at_a_std_of_002_and_residual_outputs_lower"),
    "biases are left as memory had them": (
        "nn.init.zeros_(module.bias)",
        "pass",
        "test_model::test_a_model_made_on_meta_starts_with_the_same_values"),

    # ---- cache
    "steps share a slot": (
        "return SLOTS[self.cfg.kv](self.cfg, step, j)",
        "return SLOTS[self.cfg.kv](self.cfg, 0, j)",
        "test_cache::test_cached_logits_equal_the_full_forward"),
    "padding is stored": (
        "if min(n_new_A) < T:",
        "if False:",
        "test_cache::test_padding_is_never_stored_and_never_spills_into_the_next_row"),
    "the cache's end is not checked": (
        " or max(stop_B) > self.n_places",
        "",
        "test_cache::test_a_call_past_the_caches_end_is_refused_and_changes_nothing"),
    "a refused call is counted": (
        "        if B != self.n_rows",
        "        self.length_B = stop_B\n        if B != self.n_rows",
        "test_cache::test_a_call_past_the_caches_end_is_refused_and_changes_nothing"),
    "the mean gives the last step half": (
        "lambda step: 1.0 / (step + 1)",
        "lambda step: 0.5 if step else 1.0",
        "test_cache::test_compressed_caches_equal_the_specification"),
    "first keeps the second": (
        "1.0 * (step == 0)",
        "1.0 * (step <= 1)",
        "test_cache::test_compressed_caches_equal_the_specification"),
    "last keeps the first": (
        "1.0 + 0.0 * step",
        "1.0 * (step == 0)",
        "test_cache::test_compressed_caches_equal_the_specification"),
    "a compressed entry stays the last step's": (
        "slot[:, place_C] = kept[:, rows] = torch.lerp(",
        "kept[:, rows] = torch.lerp(",
        "test_cache::test_compressed_caches_equal_the_specification"),
    "cached keys have the weights' dtype": (
        'return torch.get_autocast_dtype(device) if device != "meta" and torch.is_autocast_enabled(device) else',
        "return",
        "test_cache::test_the_cache_has_the_dtype_of_the_keys"),

    # ---- generate
    "logits come from the last column": (
        "[n - 1 for n in n_new_B or",
        "[ids_BT.size(1) - 1 for n in n_new_B or",
        "test_cache::test_feed_answers_after_the_last_real_token_of_each_row"),
    "a stopped row goes on": (
        "row if over else row + [new]",
        "row + [new]",
        "test_cache::test_a_list_gives_a_list_cut_after_the_stop_token"),
    "a stopped row is padded with zeros": (
        "row + [stop] *",
        "row + [0] *",
        "test_cache::test_a_stopped_row_is_padded_with_its_stop_token_and_the_other_goes_on"),
    "one stop ends all rows": (
        "if all(done):",
        "if any(done):",
        "test_cache::test_a_stopped_row_is_padded_with_its_stop_token_and_the_other_goes_on"),
    "the newer half is dropped": (
        "row[-max(1, block_size // 2):]",
        "row[:max(1, block_size // 2)]",
        "test_cache::test_a_row_that_outgrows_the_context_drops_its_older_half"),
    "temperature multiplies": (
        ") / temperature)",
        ") * temperature)",
        "test_cache::test_temperature_divides_the_logits"),
    "top_k keeps one more": (
        "sorted_BV[:, top_k or sorted_BV.size(-1):]",
        "sorted_BV[:, (top_k or sorted_BV.size(-1)) + 1:]",
        "test_cache::test_top_k_keeps_the_k_likeliest"),
    "top_p stops before p": (
        "likelier_BV = sorted_BV.cumsum(-1) - sorted_BV",
        "likelier_BV = sorted_BV.cumsum(-1)",
        "test_cache::test_top_p_keeps_the_smallest_set_that_holds_p"),
    "one token is drawn for all rows": (
        "(p_BV / torch.empty_like(p_BV).exponential_(generator=generator)).argmax(-1)",
        "(p_BV[:1] / torch.empty_like(p_BV[:1]).exponential_(generator=generator)).argmax(-1).expand(len(p_BV))",
        "test_cache::test_samples_of_one_prompt_begin_with_many_different_tokens"),
    "the generator given is not used": (
        "torch.empty_like(p_BV).exponential_(generator=generator)",
        "torch.empty_like(p_BV).exponential_()",
        "test_cache::test_the_same_generator_gives_the_same_text_and_leaves_torchs_own_alone"),
    "a stop token in the prompt stops": (
        "[False] * len(prompts)",
        "[stop in p.tolist() for p in prompts]",
        "test_cache::test_a_stop_token_in_the_prompt_stops_nothing"),
    "the cache of the last call is used again": (
        "make_cache(model, len(rows), n_places, depth, exit) if use_cache",
        "model.__dict__.setdefault('kept', make_cache(model, len(rows), n_places, depth, exit)) if use_cache",
        "test_cache::test_calls_do_not_remember_each_other"),
    "half of the damage is enough": (
        "if not torch.isfinite(logits_BV).all():",
        "if not torch.isfinite(logits_BV).any():",
        "test_cache::test_damaged_weights_give_one_clear_error"),
    "the model is left in evaluation mode": (
        "model.train(was_training)",
        "pass",
        "test_cache::test_generate_runs_in_evaluation_mode_and_restores_the_mode"),

    # ---- counts
    "the adapter is counted once": (
        "lambda step: share(step) * per_step)",
        "lambda step: share(step) * per_step / depth)",
        "test_counts::test_exact_flops_are_the_flops_of_a_real_forward"),
    "grouped keys are counted at full width": (
        "cfg.n_embd, cfg.kv_heads * cfg.head_width * made",
        "cfg.n_embd, cfg.n_embd * made",
        "test_counts::test_exact_flops_are_the_flops_of_a_real_forward"),
    "MoR's formula knows of grouped keys": (
        "wide = replace(cfg, n_kv_head=None)",
        "wide = cfg",
        "test_counts::test_flops_equal_the_formula_of_the_mor_paper"),
    "the scratch entry is not counted": (
        'if cache in ("first", "mean")',
        'if cache == "mean"',
        "test_counts::test_kv_bytes_are_those_of_the_cache_to_the_byte"),

    # ---- poisson, lora, ouro
    "bptt detaches nothing": (
        "torch.is_grad_enabled() and step >= depth - self.bptt",
        "torch.is_grad_enabled()",
        "test_rivals::test_bptt_of_one_step_is_the_gradient_of_a_one_step_model_from_where_the_others_came"),
    "bptt counts from the first step": (
        "step >= depth - self.bptt",
        "step < self.bptt",
        "test_rivals::test_bptt_of_one_step_is_the_gradient_of_a_one_step_model_from_where_the_others_came"),
    "poisson forgets its one step": (
        "torch.poisson(tau.exp(), generator=rng)) + 1",
        "torch.poisson(tau.exp(), generator=rng))",
        "test_rivals::test_poisson_depths_are_on_average_one_more_than_rbar_with_a_heavy_tail"),
    "poisson's tail is thin": (
        "0.5 * torch.randn((), generator=rng)",
        "0.5**2 / 2 + 0.0 * torch.randn((), generator=rng)",
        "test_rivals::test_poisson_depths_are_on_average_one_more_than_rbar_with_a_heavy_tail"),
    "every rank draws its own depth": (
        "generator(shared)) if depth is None",
        "generator(shared + own)) if depth is None",
        "test_rivals::test_two_ranks_draw_the_same_poisson_depth_and_first_states_of_their_own"),
    "a first state forgets its position": (
        "self.still[position_BT]",
        "self.still[torch.zeros_like(position_BT) + torch.arange(position_BT.size(1))]",
        "test_rivals::test_a_random_first_state_of_poisson_follows_the_position_while_decoding"),
    "training begins with evaluation's first state": (
        "return truncated_normal(still_BTD.shape, std, fold_in(self.seed, \"first state\"), still_BTD.device).to(still_BTD.dtype)",
        "return still_BTD",
        "test_rivals::test_in_training_a_random_first_state_of_poisson_is_the_calls_own"),
    "a first state is not cut": (
        "nn.init.trunc_normal_(torch.empty(shape, device=device), 0, std, -3 * std, 3 * std, generator=",
        "torch.empty(shape, device=device).normal_(0, std, generator=",
        "test_rivals::test_a_random_first_state_of_poisson_is_normal_cut_at_three_sigma"),
    "steps share their low-rank additions": (
        "(self.down[j][name][step], self.up[j][name][step])",
        "(self.down[j][name][0], self.up[j][name][0])",
        "test_rivals::test_a_step_reads_its_own_lora_and_no_other"),
    "key and value swap their low-rank additions": (
        'zip(("query", "key", "value"), B.split',
        'zip(("query", "value", "key"), B.split',
        "test_rivals::test_lora_equals_the_specification"),
    "low-rank additions decay": (
        'p.dim() >= 2 and ".lora." not in name',
        "p.dim() >= 2",
        "test_rivals::test_lora_does_not_decay"),
    "B does not start at zero": (
        'if name.startswith("down") else nn.init.zeros_(p)',
        'if name.startswith("down") else nn.init.normal_(p, std=0.02)',
        "test_rivals::test_lora_at_the_start_changes_no_logit_and_no_gradient"),
    "certain exits are rewarded": (
        "model.cfg.exit_entropy * mean(",
        "-model.cfg.exit_entropy * mean(",
        "test_rivals::test_with_uniform_chances_ouros_loss_is_the_mean_over_steps_less_beta_log_r"),
    "the last step asks its exit gate": (
        "torch.cat((before_RN[:-1] + F.logsigmoid(z_RN[:-1]), before_RN[-1:]))",
        "before_RN + F.logsigmoid(z_RN)",
        "test_rivals::test_ouros_exit_chances_sum_to_one_and_follow_the_product_rule"),
    "a step's chance forgets those before": (
        "torch.cat((before_RN[:-1] + F.logsigmoid(z_RN[:-1]), before_RN[-1:]))",
        "torch.cat((F.logsigmoid(z_RN[:-1]), before_RN[-1:]))",
        "test_rivals::test_ouros_exit_chances_sum_to_one_and_follow_the_product_rule"),
    "the exit gate does not learn from the cross-entropies": (
        "scale * ctx.ce_Q if ctx.needs_input_grad[3] else None",
        "None",
        "test_rivals::test_ouros_chunked_loss_has_the_gradients_of_cross_entropy"),
    "the chances do not weigh the gradients": (
        "weight_n[:, None] / sum_n1",
        "(weight_n != 0)[:, None] / sum_n1",
        "test_rivals::test_ouros_chunked_loss_has_the_gradients_of_cross_entropy"),
    "only the last step is supervised": (
        "states=(*who.states, h_BTD)",
        "states=(h_BTD,)",
        "test_rivals::test_ouros_loss_equals_the_specification"),
    "the loop's norm is left out": (
        "self.norm(self.router.merge(h_ACD, x_ACD, write, who, step))",
        "self.router.merge(h_ACD, x_ACD, write, who, step)",
        "test_rivals::test_ouros_loss_equals_the_specification"),
    "the norm after attention is left out": (
        "x_BTD = self.attention_after(",
        "x_BTD = (",
        "test_rivals::test_ouros_loss_equals_the_specification"),
    "the norm after the mlp is left out": (
        "return self.mlp_after(",
        "return (",
        "test_rivals::test_ouros_loss_equals_the_specification"),

    # ---- early exit
    "the exit score compares with the first step": (
        "self.past, who.put(self.past, log_p_ACV)",
        "self.past, log_p_ACV if self.past is None else self.past",
        "test_exit::test_exit_by_kl_compares_the_predictions_of_a_step_and_of_the_one_before"),
    "the exit score is the other way round": (
        "log_p_ACV.exp() * (log_p_ACV - who.take(last))",
        "who.take(last).exp() * (who.take(last) - log_p_ACV)",
        "test_exit::test_exit_by_kl_compares_the_predictions_of_a_step_and_of_the_one_before"),
    "rounding takes a score below zero": (
        "(log_p_ACV - who.take(last))).sum(-1).clamp(min=0)",
        "(log_p_ACV - who.take(last))).sum(-1)",
        "test_exit::test_an_exit_threshold_of_zero_keeps_even_a_state_at_rest"),
    "the exit gate's chances are not added up": (
        "log_stay_AC1 = log_stay_AC1 + who.take(self.past)",
        "pass",
        "test_exit::test_exit_by_cdf_adds_up_the_exit_gates_chances"),
    "who leaves stays": (
        "return who.pick(who.tell(~self.leaves(x_ACD, who), who.real_AC), *h_BTD.shape[:2])",
        "self.leaves(x_ACD, who)\n        return who",
        "test_exit::test_a_token_that_left_by_exit_is_computed_no_more"),
    "a token is read with its first features": (
        "who.put(self.x_BTD, x_ACD)",
        "x_ACD if self.x_BTD is None else self.x_BTD",
        "test_exit::test_exit_by_kl_compares_the_predictions_of_a_step_and_of_the_one_before"),
    "what left is not carried on": (
        "if who.index_AC is not None:                          # some have left",
        "if False:",
        "test_exit::test_who_left_by_exit_stands_in_later_steps_as_it_was_at_its_last"),
    "the core does not carry on what left": (
        "            self.inner.carry(step, place_C)",
        "            pass",
        "test_exit::test_who_left_by_exit_stands_in_later_steps_as_it_was_at_its_last"),
    "steps that nobody took stay empty": (
        "for step in range(self.last_step + 1, self.depth):",
        "for step in ():",
        "test_exit::test_who_left_by_exit_stands_in_later_steps_as_it_was_at_its_last"),
    "who left is seen as it was at step 0": (
        "self.core_slot(step, j), self.core_slot(step - 1, j)",
        "self.core_slot(step, j), self.core_slot(0, j)",
        "test_exit::test_who_left_by_exit_stands_in_later_steps_as_it_was_at_its_last"),
    "a full forward keeps what step 0 made": (
        "        return True\n\n\ndef kept_seat",
        "        return step == 0\n\n\ndef kept_seat",
        "test_exit::test_who_left_by_exit_stands_in_later_steps_as_it_was_at_its_last"),
    "who left is not there": (
        '"stay": (StayNoCache, KVCache)',
        '"stay": (NoCache, KVCache)',
        "test_exit::test_who_left_by_exit_stands_in_later_steps_as_it_was_at_its_last"),
    "the K and V of leavers are forgotten": (
        "self.store[:] = [self.who.put(old, x) for old, x in zip(self.store or new, new)]",
        "self.store[:] = [self.who.put(torch.zeros_like(old), x) for old, x in zip(self.store or new, new)]",
        "test_exit::test_who_left_by_exit_stands_in_later_steps_as_it_was_at_its_last"),
    "a mean counts a leaver's last step again and again": (
        "kept if taken_P is None else torch.where(taken_P[:, None, None] > step, kept, self.core[block])",
        "kept",
        "test_exit::test_a_compressed_cache_with_exit_folds_the_steps_that_a_token_took"),
    "the coda of later steps is not counted": (
        "cfg.n_coda * readings(depth, exit)) * seq_len",
        "cfg.n_coda) * seq_len",
        "test_exit::test_exit_kv_bytes_are_those_of_the_cache_to_the_byte"),
    "the exit score costs nothing": (
        "score = 0 if exit is None else depth * EXITS[exit].flops(self) + (readings",
        "score = 0 if exit is None else (readings",
        "test_exit::test_exit_flops_are_the_flops_of_a_real_forward"),

    # ---- the engine
    "a router is asked for another row's step": (
        "step[..., None].clamp(max=len(units) - 1))",
        "step.flip(0)[..., None].clamp(max=len(units) - 1))",
        "test_serve::test_rows_of_an_engine_at_steps_of_their_own_do_as_alone"),
    "rows at any step have the first step's share": (
        "[step.clamp(max=len(numbers) - 1)]",
        "[step.clamp(max=0)]",
        "test_serve::test_rows_of_an_engine_at_steps_of_their_own_do_as_alone"),
    "flags forget that a step takes all": (
        "decided_AC = decided_AC | (share >= 1)",
        "pass",
        "test_serve::test_rows_of_an_engine_at_steps_of_their_own_do_as_alone"),
    "flags let go again who has stopped": (
        "return None, None, keep_AC if real_AC is None else keep_AC & real_AC",
        "return None, None, torch.ones_like(keep_AC)",
        "test_serve::test_engine_text_is_that_of_generate_alone"),
    "rows end with the first row's step": (
        "(who.take(who.wanted_BT1)[..., 0] == step + 1)[..., None]",
        "(who.take(who.wanted_BT1)[..., 0] == (step if isinstance(step, int) else step[0]) + 1)[..., None]",
        "test_serve::test_rows_of_an_engine_at_steps_of_their_own_do_as_alone"),
    "rows share the first row's low-rank additions": (
        "step if isinstance(step, int) else step[:, 0]",
        "step if isinstance(step, int) else step[:1, 0].expand(len(step))",
        "test_serve::test_rows_of_an_engine_at_steps_of_their_own_do_as_alone"),
    "the low-rank pair of a step is cut like rows": (
        "x if x is None or x.dim() < 3 else x[:n]",
        "x if x is None else x[:n]",
        "test_serve::test_rows_of_an_engine_at_one_step_share_its_low_rank_additions"),
    "a token may leave after its first step": (
        "default, fresh, width = 5e-4, -math.inf,",
        "default, fresh, width = 5e-4, 0.0,",
        "test_serve::test_engine_text_is_that_of_generate_alone"),
    "the next token begins with the last one's exit score": (
        "        self.past.index_fill_(0, row_n, self.fresh)",
        "        pass",
        "test_serve::test_engine_text_is_that_of_generate_alone"),
    "a span reads one place too many": (
        "k_1GPK[:, :, first:end], v_1GPK[:, :, first:end]",
        "k_1GPK[:, :, first : end + 1], v_1GPK[:, :, first : end + 1]",
        "test_serve::test_engine_text_is_that_of_generate_alone"),
    "a kernel sees one place too many": (
        "column_S < n_A[:, None]",
        "column_S <= n_A[:, None]",
        "test_serve::test_engine_text_is_that_of_generate_alone"),
    "a kernel reads places of others where it sees none": (
        "(first_A[:, None] + column_S).where(there_AS, first_A[:, None])",
        "(first_A[:, None] + column_S).clamp(max=len(k_PGK) - 1)",
        "test_serve::test_a_request_with_damaged_logits_fails_alone_and_leaves_its_slot_of_the_engine_clean"),
    "a lot is drawn in float32": (
        "step if isinstance(step, int) else step.double()",
        "step if isinstance(step, int) else step.float()",
        "test_serve::test_a_lot_is_the_same_for_a_row_of_an_engine_and_for_a_whole_step"),
    "free runs of places stay in pieces": (
        "            if first == self.free[-1][1]:",
        "            if False:",
        "test_serve::test_serve_starves_nobody_and_keeps_nothing"),
    "a window that moves leaves its entries behind": (
        "store[:, new.first : new.first + span.used] = store[:, span.first : span.first + span.used]",
        "pass",
        "test_serve::test_routed_windows_of_an_engine_grow_by_a_unit_where_they_lie_or_elsewhere"),
    "windows always move": (
        "if first == end and stop - first >= UNIT:",
        "if False:",
        "test_serve::test_routed_windows_of_an_engine_grow_by_a_unit_where_they_lie_or_elsewhere"),
    "later windows are as long as the text": (
        "if self.by_arrival else n for lane",
        "if False else n for lane",
        "test_serve::test_engine_memory_is_what_was_declared_to_the_byte"),
    "kv=share has a lane for each step": (
        'if how == "full" and cfg.kv != "share" else',
        'if how == "full" else',
        "test_serve::test_engine_memory_is_what_was_declared_to_the_byte"),
    "scratch is not counted": (
        "*self.scratch, *self.halves))",
        "*self.halves))",
        "test_serve::test_engine_memory_is_what_was_declared_to_the_byte"),
    "the kept half is taken from the row at hand": (
        "torch.where(self.first_A111[:n], made, self.kept[self.slot_A[:n]])",
        "made",
        "test_serve::test_rows_of_an_engine_at_steps_of_their_own_do_as_alone"),
    "who left the loop is not seen by later steps": (
        "store[:, target] = store[:, source]",
        "pass",
        "test_serve::test_engine_text_is_that_of_generate_alone"),
    "all rows fold as step 0": (
        "place_C, share = self.core_window.place_C, self.share(step)\n        share = share",
        "place_C, share = self.core_window.place_C, self.share(step * 0)\n        share = share",
        "test_serve::test_rows_of_an_engine_at_steps_of_their_own_do_as_alone"),
    "the youngest is taken in first": (
        "            if not self.shelves.take(self.waiting[0]):",
        "            self.waiting.rotate(1)\n            if not self.shelves.take(self.waiting[0]):",
        "test_serve::test_serve_admits_in_turn_and_as_soon_as_there_is_room"),
    "who was put aside waits at the end": (
        "self.waiting.appendleft(request)",
        "self.waiting.append(request)",
        "test_serve::test_serve_admits_in_turn_and_as_soon_as_there_is_room"),
    "who was put aside has lost its state": (
        "                x[request.slot] = state[name]",
        "                pass",
        "test_serve::test_who_is_put_aside_by_an_engine_comes_back_as_it_was"),
    "who was put aside has lost the half that it kept": (
        " | dict(enumerate(self.shelves.halves))",
        "",
        "test_serve::test_who_is_put_aside_by_an_engine_comes_back_as_it_was"),
    "who was put aside has lost its K and V": (
        "            self.shelves.write(request, held)",
        "            pass",
        "test_serve::test_who_is_put_aside_by_an_engine_comes_back_as_it_was"),
    "a failed request leaves its scratch behind": (
        "old = torch.where(self.first_A111[..., 0], new, kept[:, self.slot_A])",
        "old = kept[:, self.slot_A]",
        "test_serve::test_a_request_with_damaged_logits_fails_alone_and_leaves_its_slot_of_the_engine_clean"),
    "one request's damage is everyone's": (
        "fine_P = torch.isfinite(logits_PV).all(-1)",
        "fine_P = torch.isfinite(logits_PV).all().expand(len(logits_PV))",
        "test_serve::test_a_request_with_damaged_logits_fails_alone_and_leaves_its_slot_of_the_engine_clean"),
    "a request that is done keeps its slot": (
        "            self.free.append(request.slot)\n",
        "            pass\n",
        "test_serve::test_a_stop_frees_a_slot_of_the_engine_at_once"),
    "the stop token does not stop": (
        "if token == request.stop or len(",
        "if len(",
        "test_serve::test_serve_streams_each_token_once_in_order_and_a_stop_ends_a_text"),
    "a token's events come again": (
        "events, self.events = self.events, []",
        "events = self.events",
        "test_serve::test_serve_streams_each_token_once_in_order_and_a_stop_ends_a_text"),
    "requests draw from one seed": (
        "rng = generator(seed, self",
        "rng = generator(0, self",
        "test_serve::test_serve_does_not_let_the_batch_change_a_text"),
    "a tick hears twice": (
        "torch.cat(flat).tolist() if flat",
        "[n for x in flat for n in x.tolist()] if flat",
        "test_serve::test_hearing_an_engine_is_one_transfer"),
    "a tick asks before the end": (
        "        logits_PV, fine_P = (x[: len(rows)]",
        "        bool(self.model.embed.weight.sum() > 0)\n        logits_PV, fine_P = (x[: len(rows)]",
        "test_serve::test_a_tick_of_an_engine_asks_the_device_for_nothing_but_what_it_hears_in_the_end"),
    "new rows go before those in the loop": (
        "key=lambda request: request.step == 0)[: self.core_rows]",
        "key=lambda request: request.number)[:1]",
        "test_serve::test_rows_of_an_engine_at_different_steps_share_a_call"),
    "later steps make shared keys again": (
        "n_first = None if n_first == len(rows) else n_first",
        "n_first = None",
        "test_serve::test_an_engine_makes_shared_keys_and_values_at_step_0_alone"),
    "keys read are not counted from the window": (
        "core_keys=sum(row[4] for row in rows)",
        "core_keys=sum(row[4] - 1 for row in rows)",
        "test_serve::test_the_counts_of_an_engine_are_those_of_the_steps_that_its_tokens_took"),
    "a cancelled request goes on waiting": (
        "            self.waiting.remove(request)\n",
        "            pass\n",
        "test_serve::test_who_is_cancelled_leaves_the_engine_and_the_others_write_on"),
    "too long a request is taken": (
        "        if request.n_places > self.n_places:\n",
        "        if False:\n",
        "test_serve::test_an_engine_refuses_a_request_with_the_numbers"),
    "passes are filled up to no fixed number": (
        'self.core_rows if name == "core" else',
        'len(rows) if name == "core" else',
        "test_serve::test_a_step_of_an_engine_computes_its_rows_alone_and_in_fixed_passes_always_as_many"),
    "a prompt is read again for larger windows": (
        "self.wait(request, sizes, lambda: self.shelves.adopt(request, cache))",
        'self.counts["prompt_tokens"] += 1; self.wait(request, sizes, lambda: self.shelves.adopt(request, cache))',
        "test_serve::test_a_prompt_that_overflows_its_windows_waits_for_larger_ones_in_an_engine"),
    "who comes back takes the step of the others": (
        "            rows = [request for request in rows if request.step == first]\n",
        "            pass\n",
        "test_serve::test_who_is_put_aside_by_an_engine_whose_rows_are_in_step_waits_for_his_own"),
    "what a run had still to tell is lost": (
        "            while self.untold:\n                yield self.untold.popleft()",
        "            told, self.untold = self.untold, deque()\n            yield from told",
        "test_serve::test_who_leaves_the_run_of_an_engine_in_the_midst_misses_nothing_in_the_next"),
    "an engine goes on in training mode": (
        "            self.model.eval()\n        with self.autocast:",
        "            pass\n        with self.autocast:",
        "test_serve::test_an_engine_serves_in_evaluation_mode_whoever_trains_in_between"),
    "a graph reads the weights that autocast keeps": (
        "    @torch.inference_mode()\n    def tick",
        "    @torch.no_grad()\n    def tick",
        "test_serve::test_a_graph_of_an_engine_reads_no_weights_that_autocast_keeps"),
    "a graph writes the state into a new tensor": (
        "                    before[name].copy_(after[name])\n            state[\"h\"] = before[\"h\"]",
        "                    pass",
        "test_serve::test_what_an_engine_replays_writes_what_it_wrote_when_captured"),
    "rotary angles are sent over for each token": (
        "constant(tuple(self.turns), position_BT.device, torch.get_default_dtype())",
        "torch.tensor(self.turns, device=position_BT.device)",
        "test_serve::test_what_an_engine_replays_writes_what_it_wrote_when_captured"),
    "the number of a step is sent over": (
        "torch.full((), step, device=self.index_AC.device)",
        "torch.as_tensor(step, device=self.index_AC.device)",
        "test_serve::test_what_an_engine_replays_writes_what_it_wrote_when_captured"),
    "a draw asks whether its probabilities are some": (
        "return (p_BV / torch.empty_like(p_BV).exponential_(generator=generator)).argmax(-1)",
        "return torch.multinomial(p_BV, 1, generator=generator).squeeze(-1)",
        "test_serve::test_a_tick_of_an_engine_asks_the_device_for_nothing_but_what_it_hears_in_the_end"),
    "a kernel of windows begins one unit late": (
        "cache_batch_idx=(first_A // UNIT).int()",
        "cache_batch_idx=(first_A // UNIT + 1).int()",
        "test_serve::test_all_kernels_of_an_engine_read_the_same_places"),
    "the last window of the store does not reach far enough": (
        "beyond = fixed * (UNIT + n_places * (flash_attn_with_kvcache is not None))",
        "beyond = fixed * UNIT",
        "test_serve::test_all_kernels_of_an_engine_read_the_same_places"),
    "a token that the model does not know is taken": (
        "        if not 0 <= min(ids) <= max(ids) < self.model.cfg.vocab_size:\n",
        "        if False:\n",
        "test_serve::test_an_engine_refuses_a_request_with_the_numbers"),
}


def mutated(old, new):
    """(file's name, its source with the mistake)"""
    holds = [name for name, source in SOURCES.items() for _ in range(source.count(old))]
    assert len(holds) == 1, f"{old!r} stands {len(holds)} times in model.py and sample.py; bring this list up to date"
    return holds[0], SOURCES[holds[0]].replace(old, new)


@contextlib.contextmanager
def in_place_of(name, source):
    """sys.modules[name] made from `source`, and every test module imported anew on top of it."""
    fresh = lambda: [name for name in sys.modules if name in ANEW or name.startswith("test_")]  # noqa: E731
    kept = {name: sys.modules.pop(name) for name in fresh()}
    module = sys.modules[name] = types.ModuleType(name)
    module.__file__ = f"{name}.py"
    try:
        exec(compile(source, f"{name}.py", "exec"), vars(module))
        yield
    finally:
        for name in fresh():
            del sys.modules[name]
        sys.modules.update(kept)


def run_test(where):
    """Call a test function with each of its parameters that is not slow, as pytest would."""
    module, name = where.split("::")
    test = getattr(importlib.import_module(module), name)
    choices = []
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize":
            names = [name.strip() for name in mark.args[0].split(",")]
            values = [value for value in mark.args[1] if not any(mark.name == "slow" for mark in getattr(value, "marks", ()))]
            values = [getattr(value, "values", value if len(names) > 1 else [value]) if not isinstance(value, dict) else [value] for value in values]
            choices.append([dict(zip(names, value)) for value in values])
    for parts in itertools.product(*choices):
        with pytest.MonkeyPatch.context() as monkeypatch:
            fixtures = {"monkeypatch": monkeypatch} if "monkeypatch" in inspect.signature(test).parameters else {}
            test(**{name: value for part in parts for name, value in part.items()}, **fixtures)


@pytest.mark.parametrize("mistake", MUTANTS)
def test_a_mistake_is_found(mistake):
    old, new, where = MUTANTS[mistake]
    with in_place_of(*mutated(old, new)):
        with pytest.raises((AssertionError, pytest.fail.Exception, RuntimeError, IndexError, ValueError)):     # not a NameError
            run_test(where)


@pytest.fixture(scope="module")
def unchanged():
    with in_place_of("model", SOURCES["model"]):
        yield


@pytest.mark.parametrize("where", sorted({where for _, _, where in MUTANTS.values()}))
def test_the_same_test_passes_without_a_mistake(where, unchanged):
    run_test(where)
