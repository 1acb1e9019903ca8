//! The next step's graph, built before its tokens are known, on MLX.

use shardpack_formats::memory::TOKENS_PER_PAGE;

use super::*;
use crate::{backend::Mlx, engine::sample::mix, testing::mlx::mlx};

fn mlx_engine(backend: Mlx, model: &'static str) -> Engine<Mlx> {
    let packages = Recipe::plain(model, 1).open();
    let options = EngineOptions { max_sequences: 4, prefill_tokens: 64, ..STANDARD };
    Engine::new(Model::load(&packages[0], &backend).unwrap(), backend, options)
}

/// A request that is submitted before a step, and perhaps cancelled before a later one.
#[derive(Clone, Debug)]
struct Arrival {
    step: usize,
    cancelled: Option<usize>,
    request: GenerateRequest,
}

/// Random numbers: how many there were.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 += 1;
        mix(self.0) % end
    }

    fn arrival(&mut self, max_positions: usize) -> Arrival {
        let len = match self.below(3) {
            0 => TOKENS_PER_PAGE - 3,
            1 => TOKENS_PER_PAGE + 5,
            _ => 1 + self.below(40) as usize,
        };
        // The same beginning for all, so that pages are shared.
        let len = len.min(max_positions - 30);
        let prompt: Vec<u32> = (0..len).map(|place| (place * 7 % 90) as u32 + 1).collect();
        let mut request = request(&prompt, 1 + self.below(24) as u32);
        let step = self.below(20) as usize;
        request.sampling.temperature = [0.0, 0.8][self.below(2) as usize];
        request.sampling.seed = step as u64;
        request.logprobs = [None, Some(2)][self.below(2) as usize];
        let cancelled = (self.below(3) == 0).then(|| step + 1 + self.below(25) as usize);
        Arrival { step, cancelled, request }
    }
}

/// Every request's answer, and the steps that were taken up as they were prepared.
fn answers(
    engine: &mut Engine<Mlx>,
    epoch: u64,
    arrivals: &[Arrival],
    ahead: bool,
) -> (BTreeMap<RequestId, Answer>, u64) {
    let group = thread_groups(1, epoch).remove(0);
    engine.reset();
    engine.look_ahead(ahead);
    let before = engine.taken_up();
    let mut events = Vec::new();
    for step in 0.. {
        for (id, arrival) in arrivals.iter().enumerate() {
            if arrival.step == step {
                engine.submit(RequestId(id as u64), arrival.request.clone());
            }
            if arrival.cancelled == Some(step) {
                engine.cancel(RequestId(id as u64));
            }
        }
        let outcome = engine.lead(group.as_ref(), &mut |event| events.push(event)).unwrap();
        if outcome == StepOutcome::Idle && arrivals.iter().all(|arrival| arrival.step <= step) {
            break;
        }
    }
    (collect(events), engine.taken_up() - before)
}

#[test]
fn mlx_steps_built_ahead_give_the_same_bits() {
    for model in ["llama", "qwen3"] {
        let Some(backend) = mlx() else { return };
        let mut engine = mlx_engine(backend, model);
        let max_positions = engine.model().spec().max_positions as usize;
        let mut taken_up = 0;
        for seed in 0..24 {
            let mut random = Random(seed << 32);
            let count = 1 + random.below(5);
            let arrivals: Vec<_> = (0..count).map(|_| random.arrival(max_positions)).collect();
            let (plain, none) = answers(&mut engine, 2 * seed + 1, &arrivals, false);
            let (ahead, some) = answers(&mut engine, 2 * seed + 2, &arrivals, true);
            assert_eq!(plain, ahead, "{model}, seed {seed}");
            assert_eq!(none, 0);
            taken_up += some;
        }
        assert!(taken_up > 100, "{model}: only {taken_up} steps were taken up as prepared");
    }
}
