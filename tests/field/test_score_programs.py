"""What is found in the labelled programs stays found, and what is wrongly said does not grow."""

import os

import pytest

from tests.field.score_programs import judged, programs

KEPT = {
    "strangers": (435, 153, set[str]()),
    "serving": (472, 171, set[str]()),
    "training": (446, 172, set[str]()),
    "services": (437, 145, set[str]()),
    "attention": (454, 164, set[str]()),
    "companies": (565, 191, set[str]()),
    "exam": (566, 192, {"window_cache.py:87"}),
    "practice": (473, 170, set[str]()),
    "verdicts": (453, 161, {"pipeline_stages.py:187"}),
    "outsiders": (398, 146, set[str]()),
    "bystanders": (348, 118, set[str]()),
    "passersby": (431, 139, {"pipeline_stage.py:50"}),
    "commuters": (424, 147, set[str]()),
    "couriers": (217, 69, set[str]()),
    "trainers": (238, 79, {"optim_offload.py:142"}),
    "operators": (219, 73, set[str]()),
    "makers": (180, 53, {"p05_slab/cache.py:24", "p13_async_workers.py:61"}),
    "declared": (211, 69, set[str]()),
    "engines": (208, 65, set[str]()),
    "libraries": (243, 74, {"p05_pinned_loader.py:123"}),
    "postmortems": (258, 95, set[str]()),
    "backends": (213, 69, set[str]()),
    "runtimes": (224, 69, set[str]()),
    "labellers": (178, 56, set[str]()),
    "platforms": (196, 60, {"grad_buckets.py:75", "speculative_decode.py:128"}),
    "kernels": (217, 67, {"longctx/offload.py:19", "recompute_arena.py:83"}),
    "reviewers": (213, 71, set[str]()),
    "examiners": (216, 75, {"shard_files.py:132"}),
    "maintainers": (209, 73, set[str]()),
    "colleagues": (206, 63, {"grad_buckets.py:126"}),
    "inspectors": (193, 69, set[str]()),
    "tutors": (191, 68, set[str]()),
    "surveyors": (191, 61, {"unshard_arena.py:51"}),
    "mentors": (198, 67, set[str]()),
    "advisers": (190, 67, set[str]()),
    "stewards": (191, 67, {"ckpt_shards.py:132", "disagg/decode.py:107"}),
    "wardens": (194, 63, {"job_scheduler.py:156", "kv_block_manager.py:171"}),
    "curators": (193, 64, set[str]()),
    "referees": (196, 59, {"nixl_transfer.py:110", "shm_loader.py:48"}),
    "jurors": (199, 61, {"disagg_router/router.py:32"}),
    "assessors": (201, 61, {"kv_scheduler.py:115"}),
    "auditors": (188, 66, set[str]()),
    "pilots": (198, 67, {"longnet_train/attention.py:50"}),
    "deputies": (201, 67, set[str]()),
    "ushers": (194, 62, set[str]()),
    "keepers": (195, 63, {"block_manager.py:119", "block_manager.py:130"}),
    "stokers": (198, 65, set[str]()),
    "brokers": (193, 66, set[str]()),
    "sextons": (189, 69, set[str]()),
    "coopers": (188, 70, set[str]()),
    "farriers": (192, 66, {"comm_registry.py:104"}),
    "glaziers": (196, 69, {"weight_sync.py:91"}),
    "thatchers": (194, 71, set[str]()),
    "chandlers": (192, 70, set[str]()),
    "masons": (199, 65, set[str]()),
    "joiners": (207, 68, {"block_layout.py:60"}),
    "wrights": (234, 71, {"paged_blocks.py:175"}),
    "tanners": (280, 85, set[str]()),
    "weavers": (199, 70, {"spec_decode.py:56"}),
    "saddlers": (211, 68, set[str]()),
    "millers": (233, 77, {"ckpt/staging.py:45", "shm_loader/loader.py:31", "zero_gather.py:223"}),
    "potters": (197, 63, {"collective/bucket.py:43"}),
    "drovers": (196, 69, {"run_tracker/locks.py:25", "run_tracker/store.py:48", "run_tracker/store.py:58"}),
    "porters": (154, 53, {"activation_offload.py:153", "activation_offload.py:169"}),
    "hatters": (214, 76, {"framekit.py:336", "rpcwire.py:358"}),
    "tinkers": (204, 80, {"night_watch.py:66"}),
    "carters": (254, 79, {"batch_assembler.py:209"}),
    "turners": (245, 80, {"tp_collectives.py:102", "tp_collectives.py:84"}),
    "bakers": (228, 71, {"activation_offload.py:163"}),
    "grocers": (160, 47, set[str]()),
    "colliers": (210, 72, set[str]()),
    "cobblers": (220, 77, set[str]()),
    "fletchers": (215, 73, {"lora_slots.py:125", "radix_cache.py:135", "radix_cache.py:146"}),
    "carvers": (222, 75, {"bucket_reducer.py:174", "kv_blocks.py:95"}),
    "dyers": (212, 78, {"admission.py:188", "kv_block_manager.py:88"}),
    "brewers": (235, 76, {"grad_comm.py:85"}),
    "smiths": (254, 76, set[str]()),
    "spinners": (225, 74, {"rollout/request.py:33"}),
    "sawyers": (205, 65, {"lora_slots/engine.py:53", "prefix_cache.py:216"}),
    "tilers": (294, 96, {"ring_attn/attention.py:58", "ring_attn/attention.py:59"}),
    "plumbers": (209, 64, set[str]()),
    "slaters": (236, 63, {"token_index.py:88"}),
    "roofers": (
        209,
        69,
        {"paged_kv/scheduler.py:29", "paged_kv/scheduler.py:61", "streams.py:121", "tree_attention.py:70"},
    ),
    "curriers": (223, 78, set[str]()),
    "ropers": (201, 73, {"ring_attention.py:99"}),
    "cutlers": (206, 67, set[str]()),
    "lorimers": (203, 57, set[str]()),
    "fullers": (222, 69, {"objstore/client.py:76", "objstore/store.py:38"}),
    "gilders": (220, 67, {"moe_dispatch.py:106", "zero_offload/optimizer.py:69"}),
    "pewterers": (213, 76, {"tiered_feature_pool.py:86"}),
    "quarriers": (
        144,
        39,
        {"continuous_batching.py:173", "continuous_batching.py:71", "continuous_batching.py:80"},
    ),
    "founders": (161, 50, {"act_offload.py:182", "grad_buckets.py:94", "paged_engine/scheduler.py:74"}),
    "nailers": (217, 67, {"pinned_staging.py:36", "scheduler.py:174", "scheduler.py:206"}),
    "skinners": (222, 68, {"staging/pool.py:114", "staging/uploader.py:30"}),
    "braziers": (222, 69, set[str]()),
}
"""Of each set the labels, the leaks found at least, and the clean sites that are reported all the same."""

TOLD_ELSEWHERE = {
    "kv_paging.py:243",
    "callback_tickets.py:112",
    "train_io/loader.py:58",
    "ulysses/exchange.py:41",
    "prefill_gate.py:245",
    "ring_attention.py:169",
    "shard_refs.py:258",
    "shard_refs.py:259",
    "radix_prefix.py:127",
}
"""Leaks that are told where the lease is taken out of a table, or of its guard, and labelled where it was put
in."""


OLDEST = 91
"""So many of the first sets, most of the time of all, are judged by `make fuzz` alone."""


@pytest.mark.slow
@pytest.mark.parametrize("of", list(KEPT)[0 if "POOLAUDIT_FUZZ" in os.environ else OLDEST :])
def test_the_score_of_the_programs_is_kept(of: str) -> None:
    sites, found_at_least, wrongly_said = KEPT[of]
    labels = []
    for program in programs(of):
        its, elsewhere = judged(program)
        unknown = set(elsewhere) - TOLD_ELSEWHERE
        assert not unknown, f"reported where nothing is labelled: {unknown}"
        labels += its
    assert len(labels) == sites
    assert sum(each.leaks and bool(each.codes) for each in labels) >= found_at_least
    assert {f"{each.path}:{each.line}" for each in labels if each.codes and not each.leaks} <= wrongly_said
