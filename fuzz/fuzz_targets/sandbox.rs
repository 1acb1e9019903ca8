//! Fuzzes `targets::sandbox`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| shardpack_fuzz::run("sandbox", data));
