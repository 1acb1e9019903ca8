//! Fuzzes `targets::membership`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| shardpack_fuzz::run("membership", data));
