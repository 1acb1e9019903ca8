//! Requests that go on in another group of ranks: the tokens of an undisturbed run.

use shardpack_engine_api::*;

use super::{
    Answer, Ranks, STANDARD, engine,
    requests::{Factory, affine, requests},
};

/// What is left of a request after its first `count` tokens.
fn after(request: &GenerateRequest, whole: &Answer, count: usize) -> GenerateRequest {
    let generated = whole.tokens[..count].iter().map(|token| TokenId(*token)).collect();
    GenerateRequest { generated, ..request.clone() }
}

/// Every kind of sampling, from every token on, alone and together.
#[test]
fn requests_go_on_with_the_tokens_of_an_undisturbed_run() {
    let all = requests();
    let whole = Ranks::new(affine(2), STANDARD).answers(&all);
    for count in [0, 1, 4, 8] {
        let rest: Vec<_> =
            all.iter().zip(&whole).map(|(request, whole)| after(request, whole, count)).collect();
        let answers = Ranks::new(affine(2), STANDARD).answers(&rest);
        for (answer, whole) in answers.iter().zip(&whole) {
            assert_eq!(answer.tokens, whole.tokens[count..], "after {count}");
            assert_eq!(answer.logprobs, whole.logprobs[count..], "after {count}");
            assert_eq!(answer.end, whole.end, "tokens are counted from the beginning");
        }
    }
}

#[test]
fn a_request_whose_end_was_lost_ends_at_once() {
    let request = requests().remove(0);
    let whole = Ranks::new(affine(1), STANDARD).answers(std::slice::from_ref(&request)).remove(0);
    let all = after(&request, &whole, whole.tokens.len());
    let answer = Ranks::new(affine(1), STANDARD).answers(&[all]).remove(0);
    assert_eq!((answer.tokens, answer.end), (vec![], whole.end));
}

#[test]
fn a_constraint_goes_on_where_it_was() {
    let ranks = || {
        let mut ranks = Ranks::new(affine(2), STANDARD);
        ranks.leader = engine(&affine(2).open()[0], STANDARD).with_constraints(Box::new(Factory));
        ranks
    };
    let request = GenerateRequest {
        constraint: Some(ConstraintSource("5".to_owned())),
        ..requests().remove(1)
    };
    let whole = ranks().answers(std::slice::from_ref(&request)).remove(0);
    assert_eq!(whole.tokens.len(), 5);
    for count in 0..=5 {
        let answer = ranks().answers(&[after(&request, &whole, count)]).remove(0);
        assert_eq!((&answer.tokens[..], &answer.end), (&whole.tokens[count..], &whole.end));
    }
    // Tokens that it would not have allowed are not from it.
    let wrong = GenerateRequest { generated: vec![TokenId(1)], ..request.clone() };
    let beyond = GenerateRequest { generated: vec![TokenId(1 << 20)], ..request };
    let answers = ranks().answers(&[wrong, beyond]);
    assert!(answers.iter().all(|answer| answer.tokens.is_empty()), "{answers:?}");
    assert!(answers[1].end.clone().unwrap().unwrap_err().contains("vocabulary"));
}
