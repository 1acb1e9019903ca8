//! Steps whose graphs were built before their tokens were known choose the tokens that transformers
//! chose, whatever a layer keeps: keys, compressed entries, states.

use shardpack_converter::plan::ExpertSharding;
use shardpack_engine::{
    engine::{Engine, EngineOptions, RankEngine, StepOutcome, memory_group},
    loading::OpenOptions,
    model::Model,
};
use shardpack_engine_api::{Event, GenerateRequest, RequestId, TokenId};
use shardpack_formats::memory::KvType;
use shardpack_mlx::runtime;
use tempfile::tempdir;

use super::{families, mlx, numbers, tokens};
use crate::{
    reference_models::{open_with, write},
    skip::mlx_runtime,
};

#[test]
fn mlx_chooses_the_tokens_of_transformers_with_steps_built_ahead() {
    let Some(runtime) = mlx_runtime(runtime::FOLDER) else { return };
    for model in &families() {
        let folder = tempdir().unwrap();
        let set = folder.path().join("set");
        write(model, &set, 16, 1, ExpertSharding::Inside);
        let package = open_with(&set, 1, OpenOptions::stored(1)).remove(0);
        let backend = mlx(&runtime, KvType::F32);
        let model_here = Model::load(&package, &backend).unwrap();
        let mut engine = Engine::new(model_here, backend, EngineOptions::STANDARD);
        let group = memory_group(1).unwrap().remove(0);
        let (prompt, greedy) = (tokens(model), numbers(model, "greedy"));
        let mut found = [Vec::new(), Vec::new()];
        for step in 0.. {
            // The second one joins in the middle of the first one's answer, and outlives it.
            if step == 0 || step == 3 {
                let request = GenerateRequest::greedy(prompt.clone(), greedy.len() as u32);
                engine.submit(RequestId(step / 3), request);
            }
            let outcome = engine.lead(group.as_ref(), &mut |event| match event {
                Event::Token { request, token, .. } => found[request.0 as usize].push(token),
                Event::Finished { .. } => {}
                other => panic!("{other:?}"),
            });
            if outcome.unwrap() == StepOutcome::Idle && step > 3 {
                break;
            }
        }
        let greedy: Vec<TokenId> = greedy.into_iter().map(TokenId).collect();
        let name = model.file_name().unwrap().display();
        assert_eq!(found, [greedy.clone(), greedy], "{name}");
    }
}
