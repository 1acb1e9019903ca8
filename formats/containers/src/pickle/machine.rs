//! The machine that a pickle is a program for, as far as dictionaries of tensors need it.
//!
//! Objects are numbered and never copied, so that a program of so many bytes makes at most so many
//! of them, and nothing is nested in memory.
//!
//! Source: Python's `pickletools.py` (opcodes) and `torch/_utils.py`, `torch/serialization.py`
//! (what is called).

use std::collections::HashMap;

use super::PickleError;
use shardpack_quantize::dtype::Dtype;

/// Longest program that is read: each tensor takes about 150 bytes.
pub const MAX_PICKLE_BYTES: u64 = 8 << 20;

/// Most dimensions of a tensor.
const MAX_DIMENSIONS: usize = 8;

/// A tensor as the program describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Saved {
    /// Its key in the dictionary.
    pub name: String,
    /// Type of its storage's elements.
    pub dtype: Dtype,
    /// The storage's name in the archive.
    pub storage: String,
    /// Elements of the storage.
    pub storage_len: u64,
    /// The tensor's first element within the storage.
    pub offset: u64,
    /// Shape.
    pub shape: Vec<u64>,
    /// Elements from one index to the next, for each dimension.
    pub strides: Vec<u64>,
}

/// What a program may name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Global {
    OrderedDict,
    RebuildTensor,
    RebuildParameter,
    Storage(Dtype),
}

impl Global {
    fn find(module: &str, name: &str) -> Option<Self> {
        Some(match (module, name) {
            ("collections", "OrderedDict") => Self::OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2") => Self::RebuildTensor,
            ("torch._utils", "_rebuild_parameter") => Self::RebuildParameter,
            ("torch", "FloatStorage") => Self::Storage(Dtype::F32),
            ("torch", "HalfStorage") => Self::Storage(Dtype::F16),
            ("torch", "BFloat16Storage") => Self::Storage(Dtype::BF16),
            ("torch", "DoubleStorage") => Self::Storage(Dtype::F64),
            ("torch", "LongStorage") => Self::Storage(Dtype::I64),
            ("torch", "IntStorage") => Self::Storage(Dtype::I32),
            ("torch", "ShortStorage") => Self::Storage(Dtype::I16),
            ("torch", "CharStorage") => Self::Storage(Dtype::I8),
            ("torch", "ByteStorage") => Self::Storage(Dtype::U8),
            ("torch", "BoolStorage") => Self::Storage(Dtype::Bool),
            _ => return None,
        })
    }
}

/// A value on the stack.
#[derive(Clone, Copy, Debug)]
enum Value<'a> {
    None,
    Truth,
    Integer(i64),
    Float,
    Text(&'a str),
    Global(Global),
    List,
    Tuple(usize),
    Dictionary(usize),
    Storage(usize),
    Tensor(usize),
}

impl Value<'_> {
    /// What it is, for messages.
    const fn words(self) -> &'static str {
        match self {
            Self::None => "nothing",
            Self::Truth => "a truth value",
            Self::Integer(_) | Self::Float => "a number",
            Self::Text(_) => "a text",
            Self::Global(_) => "a function or type",
            Self::List => "a list",
            Self::Tuple(_) => "a tuple",
            Self::Dictionary(_) => "a dictionary",
            Self::Storage(_) => "a storage",
            Self::Tensor(_) => "a tensor",
        }
    }
}

/// A storage of the archive.
#[derive(Clone, Copy)]
struct Storage<'a> {
    dtype: Dtype,
    key: &'a str,
    len: u64,
}

/// A tensor without its name.
#[derive(Clone)]
struct Tensor {
    storage: usize,
    offset: u64,
    shape: Vec<u64>,
    strides: Vec<u64>,
}

struct Machine<'a> {
    program: &'a [u8],
    at: usize,
    stack: Vec<Value<'a>>,
    marks: Vec<usize>,
    memo: HashMap<u32, Value<'a>>,
    tuples: Vec<Vec<Value<'a>>>,
    dictionaries: Vec<Vec<(Value<'a>, Value<'a>)>>,
    storages: Vec<Storage<'a>>,
    tensors: Vec<Tensor>,
}

/// Carries a program out as far as it describes tensors by name.
pub fn parse(program: &[u8]) -> Result<Vec<Saved>, PickleError> {
    let mut machine = Machine {
        program,
        at: 0,
        stack: Vec::new(),
        marks: Vec::new(),
        memo: HashMap::new(),
        tuples: Vec::new(),
        dictionaries: Vec::new(),
        storages: Vec::new(),
        tensors: Vec::new(),
    };
    if program.len() as u64 > MAX_PICKLE_BYTES {
        return Err(machine.wrong(format!("{} bytes, at most {MAX_PICKLE_BYTES}", program.len())));
    }
    let result = machine.run()?;
    machine.saved(result)
}

impl<'a> Machine<'a> {
    fn wrong(&self, problem: impl Into<String>) -> PickleError {
        PickleError::Program { at: self.at, problem: problem.into() }
    }

    fn bytes(&mut self, len: usize) -> Result<&'a [u8], PickleError> {
        let end = self.at.checked_add(len);
        let bytes = end.and_then(|end| self.program.get(self.at..end));
        let bytes = bytes.ok_or_else(|| self.wrong("it ends too early"))?;
        self.at += len;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], PickleError> {
        Ok(self.bytes(N)?.try_into().expect("as long as was taken"))
    }

    fn text(&mut self, len: usize) -> Result<&'a str, PickleError> {
        let bytes = self.bytes(len)?;
        std::str::from_utf8(bytes).map_err(|_| self.wrong("a text is no UTF-8"))
    }

    fn line(&mut self) -> Result<&'a str, PickleError> {
        let rest = &self.program[self.at..];
        let len = rest.iter().position(|byte| *byte == b'\n');
        let len = len.ok_or_else(|| self.wrong("a line has no end"))?;
        let line = self.text(len)?;
        self.at += 1;
        Ok(line)
    }

    fn pop(&mut self) -> Result<Value<'a>, PickleError> {
        // What stands below a mark is not to be taken.
        let bottom = self.marks.last().copied().unwrap_or(0);
        if self.stack.len() <= bottom {
            return Err(self.wrong("it takes a value that is not there"));
        }
        self.stack.pop().ok_or_else(|| self.wrong("it takes a value that is not there"))
    }

    fn pop_to_mark(&mut self) -> Result<Vec<Value<'a>>, PickleError> {
        let mark = self.marks.pop().ok_or_else(|| self.wrong("it goes back to no mark"))?;
        Ok(self.stack.split_off(mark))
    }

    fn tuple(&mut self, values: Vec<Value<'a>>) {
        self.stack.push(Value::Tuple(self.tuples.len()));
        self.tuples.push(values);
    }

    fn last(&mut self, count: usize) -> Result<Vec<Value<'a>>, PickleError> {
        let mut values = Vec::new();
        for _ in 0..count {
            values.push(self.pop()?);
        }
        values.reverse();
        Ok(values)
    }

    fn run(&mut self) -> Result<Value<'a>, PickleError> {
        loop {
            let opcode = self.array::<1>()?[0];
            match opcode {
                b'.' => return self.pop(),
                // PROTO
                0x80 => {
                    let version = self.array::<1>()?[0];
                    if !(2..=5).contains(&version) {
                        return Err(self.wrong(format!("protocol {version}, expected 2 to 5")));
                    }
                }
                // FRAME: the next bytes belong together.
                0x95 => {
                    self.bytes(8)?;
                }
                b'N' | 0x88 | 0x89 | b'K' | b'M' | b'J' | 0x8a | b'G' | b'X' | 0x8c => {
                    let value = self.constant(opcode)?;
                    self.stack.push(value);
                }
                b'q' | b'r' | b'h' | b'j' | 0x94 => self.remember(opcode)?,
                b'(' => self.marks.push(self.stack.len()),
                b')' => self.tuple(Vec::new()),
                b't' => {
                    let values = self.pop_to_mark()?;
                    self.tuple(values);
                }
                0x85..=0x87 => {
                    let values = self.last(usize::from(opcode - 0x84))?;
                    self.tuple(values);
                }
                b']' => self.stack.push(Value::List),
                b'}' => self.dictionary(),
                b'a' | b'e' | b's' | b'u' => self.add(opcode)?,
                b'c' => {
                    let (module, name) = (self.line()?, self.line()?);
                    self.global(module, name)?;
                }
                0x93 => {
                    let (Value::Text(name), Value::Text(module)) = (self.pop()?, self.pop()?)
                    else {
                        return Err(self.wrong("it names something by no text"));
                    };
                    self.global(module, name)?;
                }
                b'Q' => self.persistent()?,
                b'R' => self.call()?,
                b'b' => self.build()?,
                other => {
                    let problem = format!("opcode {other:#04x}, which no weights need");
                    return Err(self.wrong(problem));
                }
            }
        }
    }

    fn constant(&mut self, opcode: u8) -> Result<Value<'a>, PickleError> {
        Ok(match opcode {
            b'N' => Value::None,
            0x88 | 0x89 => Value::Truth,
            b'K' => Value::Integer(self.array::<1>()?[0].into()),
            b'M' => Value::Integer(u16::from_le_bytes(self.array()?).into()),
            b'J' => Value::Integer(i32::from_le_bytes(self.array()?).into()),
            // LONG1
            0x8a => {
                let len = usize::from(self.array::<1>()?[0]);
                let bytes = self.bytes(len)?;
                if len > 8 {
                    return Err(self.wrong("an integer beyond 64 bits"));
                }
                let is_negative = bytes.last().is_some_and(|byte| byte & 0x80 != 0);
                let mut eight = if is_negative { [0xff; 8] } else { [0; 8] };
                eight[..len].copy_from_slice(bytes);
                Value::Integer(i64::from_le_bytes(eight))
            }
            // BINFLOAT
            b'G' => {
                self.bytes(8)?;
                Value::Float
            }
            // BINUNICODE and its short form
            b'X' => {
                let len = u32::from_le_bytes(self.array()?) as usize;
                Value::Text(self.text(len)?)
            }
            _ => {
                let len = usize::from(self.array::<1>()?[0]);
                Value::Text(self.text(len)?)
            }
        })
    }

    /// Puts the last value into the memo, or a value of it on the stack.
    fn remember(&mut self, opcode: u8) -> Result<(), PickleError> {
        let index = match opcode {
            b'q' | b'h' => u32::from(self.array::<1>()?[0]),
            0x94 => self.memo.len() as u32,
            _ => u32::from_le_bytes(self.array()?),
        };
        if matches!(opcode, b'h' | b'j') {
            let value = self.memo.get(&index).copied();
            self.stack.push(value.ok_or_else(|| self.wrong("it remembers what it never saw"))?);
            return Ok(());
        }
        let value = self.pop()?;
        self.stack.push(value);
        self.memo.insert(index, value);
        Ok(())
    }

    fn dictionary(&mut self) {
        self.stack.push(Value::Dictionary(self.dictionaries.len()));
        self.dictionaries.push(Vec::new());
    }

    /// Adds to the list or dictionary below. What is in lists matters to no weights.
    fn add(&mut self, opcode: u8) -> Result<(), PickleError> {
        let values = match opcode {
            b'a' => self.last(1)?,
            b's' => self.last(2)?,
            _ => self.pop_to_mark()?,
        };
        let place = self.pop()?;
        self.stack.push(place);
        match (place, opcode) {
            (Value::List, b'a' | b'e') => Ok(()),
            (Value::Dictionary(index), b's' | b'u') => {
                let (pairs, rest) = values.as_chunks::<2>();
                if !rest.is_empty() {
                    return Err(self.wrong("a key has no value"));
                }
                self.dictionaries[index].extend(pairs.iter().map(|[key, value]| (*key, *value)));
                Ok(())
            }
            _ => Err(self.wrong(format!("it adds to {}", place.words()))),
        }
    }

    fn global(&mut self, module: &str, name: &str) -> Result<(), PickleError> {
        let short = |text: &str| text.chars().take(100).collect::<String>();
        let found = Global::find(module, name).ok_or_else(|| PickleError::Global {
            name: format!("{}.{}", short(module), short(name)),
        })?;
        self.stack.push(Value::Global(found));
        Ok(())
    }

    /// What a tuple holds.
    fn items(&self, value: Value<'a>) -> Result<&[Value<'a>], PickleError> {
        match value {
            Value::Tuple(index) => Ok(&self.tuples[index]),
            other => Err(self.wrong(format!("{}, expected a tuple", other.words()))),
        }
    }

    /// A storage: `('storage', type, key, place, elements)`.
    fn persistent(&mut self) -> Result<(), PickleError> {
        let value = self.pop()?;
        let storage = match self.items(value)? {
            [
                Value::Text("storage"),
                Value::Global(Global::Storage(dtype)),
                Value::Text(key),
                Value::Text(_),
                Value::Integer(len),
            ] => u64::try_from(*len).ok().map(|len| Storage { dtype: *dtype, key, len }),
            _ => None,
        };
        let storage =
            storage.ok_or_else(|| self.wrong("it refers to something that is no storage"))?;
        self.stack.push(Value::Storage(self.storages.len()));
        self.storages.push(storage);
        Ok(())
    }

    /// One of the three calls that there are.
    fn call(&mut self) -> Result<(), PickleError> {
        let (arguments, function) = (self.pop()?, self.pop()?);
        let Value::Global(function) = function else {
            return Err(self.wrong(format!("it calls {}", function.words())));
        };
        match (function, self.items(arguments)?) {
            (Global::OrderedDict, []) => self.dictionary(),
            (Global::RebuildTensor, [Value::Storage(storage), offset, shape, strides, ..]) => {
                let (storage, offset) = (*storage, *offset);
                let (shape, strides) = (self.sizes(*shape)?, self.sizes(*strides)?);
                let Some(offset) = count(offset).filter(|_| shape.len() == strides.len()) else {
                    return Err(self.wrong("a tensor's shape, strides and offset do not fit"));
                };
                self.stack.push(Value::Tensor(self.tensors.len()));
                self.tensors.push(Tensor { storage, offset, shape, strides });
            }
            (Global::RebuildParameter, [tensor @ Value::Tensor(_), ..]) => {
                let tensor = *tensor;
                self.stack.push(tensor);
            }
            _ => return Err(self.wrong("it calls a known function with unknown arguments")),
        }
        Ok(())
    }

    fn sizes(&self, value: Value<'a>) -> Result<Vec<u64>, PickleError> {
        let items = self.items(value)?;
        let sizes: Option<Vec<u64>> = items.iter().map(|item| count(*item)).collect();
        sizes
            .filter(|sizes| sizes.len() <= MAX_DIMENSIONS)
            .ok_or_else(|| self.wrong("a tensor's sizes are no counts"))
    }

    /// The attributes of a dictionary (versions of modules), which matter to no weights.
    fn build(&mut self) -> Result<(), PickleError> {
        self.pop()?;
        let object = self.pop()?;
        if !matches!(object, Value::Dictionary(_)) {
            return Err(self.wrong(format!("it gives attributes to {}", object.words())));
        }
        self.stack.push(object);
        Ok(())
    }

    /// The tensors of the dictionary that the program ends with.
    fn saved(&self, result: Value<'a>) -> Result<Vec<Saved>, PickleError> {
        let Value::Dictionary(index) = result else {
            return Err(self.wrong(format!("it is {}, expected a dictionary", result.words())));
        };
        let mut saved: Vec<Saved> = Vec::new();
        for (key, value) in &self.dictionaries[index] {
            let Value::Text(name) = key else {
                return Err(self.wrong(format!("a key is {}, expected a name", key.words())));
            };
            let Value::Tensor(tensor) = value else {
                return Err(self.wrong(format!(
                    "{name:?} is {}, expected a tensor: this is no file of a model's weights alone",
                    value.words()
                )));
            };
            let Tensor { storage, offset, shape, strides } = self.tensors[*tensor].clone();
            let Storage { dtype, key, len } = self.storages[storage];
            saved.push(Saved {
                name: (*name).to_owned(),
                dtype,
                storage: key.to_owned(),
                storage_len: len,
                offset,
                shape,
                strides,
            });
        }
        Ok(saved)
    }
}

fn count(value: Value<'_>) -> Option<u64> {
    match value {
        Value::Integer(value) => u64::try_from(value).ok(),
        _ => None,
    }
}
