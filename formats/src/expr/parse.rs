//! Tokens to a tree, by precedence climbing.

use super::{
    Binary, Function, MAX_DEPTH, Node, Unary, Value,
    lex::{Spanned, SyntaxError, Token, lex},
};

pub(super) fn parse(text: &str) -> Result<Node, SyntaxError> {
    let mut parser = Parser { tokens: lex(text)?, next: 0, depth: 0 };
    let node = parser.choice()?;
    match parser.peek() {
        Token::End => Ok(node),
        _ => parser.fail("expected an operator or the end"),
    }
}

struct Parser {
    tokens: Vec<Spanned>,
    next: usize,
    depth: usize,
}

/// A binary operator and how strongly it binds.
fn binary(token: &Token) -> Option<(Binary, u8)> {
    let symbol = match token {
        Token::Symbol(symbol) => *symbol,
        Token::Name(name) if name == "in" => "in",
        _ => return None,
    };
    Some(match symbol {
        "??" => (Binary::Coalesce, 1),
        "||" => (Binary::Or, 2),
        "&&" => (Binary::And, 3),
        "==" => (Binary::Equal, 4),
        "!=" => (Binary::Unequal, 4),
        "<" => (Binary::Less, 5),
        "<=" => (Binary::LessEqual, 5),
        ">" => (Binary::Greater, 5),
        ">=" => (Binary::GreaterEqual, 5),
        "in" => (Binary::In, 5),
        "+" => (Binary::Add, 6),
        "-" => (Binary::Subtract, 6),
        "*" => (Binary::Multiply, 7),
        "/" => (Binary::Divide, 7),
        "%" => (Binary::Remainder, 7),
        _ => return None,
    })
}

impl Parser {
    fn peek(&self) -> &Token {
        // Invariant: the last token is `End` and is never passed.
        &self.tokens[self.next].1
    }

    fn take(&mut self) -> Token {
        let token = self.peek().clone();
        if token != Token::End {
            self.next += 1;
        }
        token
    }

    fn take_symbol(&mut self, symbol: &'static str) -> bool {
        let found = *self.peek() == Token::Symbol(symbol);
        self.next += usize::from(found);
        found
    }

    fn expect(&mut self, symbol: &'static str) -> Result<(), SyntaxError> {
        if self.take_symbol(symbol) { Ok(()) } else { self.fail(&format!("expected `{symbol}`")) }
    }

    fn fail<T>(&self, problem: &str) -> Result<T, SyntaxError> {
        Err((self.tokens[self.next].0, problem.to_owned()))
    }

    fn deeper<T>(
        &mut self,
        inner: impl FnOnce(&mut Self) -> Result<T, SyntaxError>,
    ) -> Result<T, SyntaxError> {
        if self.depth == MAX_DEPTH {
            return self.fail(&format!("nested more than {MAX_DEPTH} levels deep"));
        }
        self.depth += 1;
        let result = inner(self);
        self.depth -= 1;
        result
    }

    fn choice(&mut self) -> Result<Node, SyntaxError> {
        self.deeper(|parser| {
            let condition = parser.operators(1)?;
            if !parser.take_symbol("?") {
                return Ok(condition);
            }
            let yes = parser.choice()?;
            parser.expect(":")?;
            let no = parser.choice()?;
            Ok(Node::Choose(Box::new([condition, yes, no])))
        })
    }

    fn operators(&mut self, weakest: u8) -> Result<Node, SyntaxError> {
        let mut left = self.unary()?;
        while let Some((operator, strength)) =
            binary(self.peek()).filter(|(_, strength)| *strength >= weakest)
        {
            self.next += 1;
            let right = self.operators(strength + 1)?;
            left = Node::Binary(operator, Box::new(left), Box::new(right));
        }
        Ok(left)
    }

    fn unary(&mut self) -> Result<Node, SyntaxError> {
        let operator = match self.peek() {
            Token::Symbol("!") => Unary::Not,
            Token::Symbol("-") => Unary::Negate,
            _ => return self.postfix(),
        };
        self.next += 1;
        let operand = self.deeper(Self::unary)?;
        Ok(Node::Unary(operator, Box::new(operand)))
    }

    fn postfix(&mut self) -> Result<Node, SyntaxError> {
        let mut node = self.primary()?;
        loop {
            if self.take_symbol(".") {
                match self.take() {
                    Token::Name(field) => node = Node::Field(Box::new(node), field),
                    _ => return self.fail("expected a field name after `.`"),
                }
            } else if self.take_symbol("[") {
                let index = self.choice()?;
                self.expect("]")?;
                node = Node::Index(Box::new(node), Box::new(index));
            } else {
                return Ok(node);
            }
        }
    }

    fn primary(&mut self) -> Result<Node, SyntaxError> {
        let at = self.next;
        let literal = match self.take() {
            Token::Int(integer) => Value::Int(integer),
            Token::Float(float) => Value::Float(float),
            Token::Text(text) => Value::Text(text),
            Token::Name(name) => match name.as_str() {
                "null" => Value::Null,
                "true" => Value::Bool(true),
                "false" => Value::Bool(false),
                "in" => {
                    self.next = at;
                    return self.fail("expected a value before `in`");
                }
                _ if self.take_symbol("(") => {
                    let function = match name.as_str() {
                        "sqrt" => Function::Sqrt,
                        "floor" => Function::Floor,
                        "length" => Function::Length,
                        _ => {
                            self.next = at;
                            return self.fail("expected the function sqrt, floor or length");
                        }
                    };
                    let operand = self.choice()?;
                    self.expect(")")?;
                    return Ok(Node::Call(function, Box::new(operand)));
                }
                _ => return Ok(Node::Name(name)),
            },
            Token::Symbol("(") => {
                let inner = self.choice()?;
                self.expect(")")?;
                return Ok(inner);
            }
            Token::Symbol("[") => return self.list(),
            _ => {
                self.next = at;
                return self.fail("expected a value");
            }
        };
        Ok(Node::Literal(literal))
    }

    fn list(&mut self) -> Result<Node, SyntaxError> {
        let mut items = Vec::new();
        while !self.take_symbol("]") {
            if !items.is_empty() {
                self.expect(",")?;
            }
            items.push(self.choice()?);
        }
        Ok(Node::List(items))
    }
}
