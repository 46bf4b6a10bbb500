package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"strings"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"watershed.dev/platform/lifecycle"
)

// framer is an HTTP/2 client that writes its own frames.
type framer struct {
	*http2.Framer
	a    *attempt
	conn net.Conn
	text bytes.Buffer
	enc  *hpack.Encoder
	// ended is closed when the server has closed the connection. Only drain closes it.
	ended chan struct{}
}

// newFramer starts HTTP/2 on a connection.
func newFramer(a *attempt, c net.Conn, settings ...http2.Setting) (*framer, error) {
	if _, err := io.WriteString(c, http2.ClientPreface); err != nil {
		return nil, err
	}
	f := &framer{Framer: http2.NewFramer(c, c), a: a, conn: c, ended: make(chan struct{})}
	f.enc = hpack.NewEncoder(&f.text)
	f.AllowIllegalWrites = true
	return f, f.WriteSettings(settings...)
}

// headers encodes a request's headers, with more headers at the end.
func (f *framer) headers(as sender, method, path string, more ...string) []byte {
	f.text.Reset()
	all := []string{":method", method, ":scheme", "https", ":authority", "x", ":path", path}
	if as != anonymous {
		all = append(all, "authorization", "Bearer "+f.a.s.tokens[as])
	}
	all = append(all, more...)
	for i := 0; i+1 < len(all); i += 2 {
		_ = f.enc.WriteField(hpack.HeaderField{Name: all[i], Value: all[i+1]})
	}
	return f.text.Bytes()
}

// request opens a stream. ended means that the request has no body.
func (f *framer) request(stream uint32, as sender, method, path string, ended bool) error {
	return f.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: f.headers(as, method, path),
		EndStream: ended, EndHeaders: true})
}

// drain reads and discards the server's frames until the connection ends.
func (f *framer) drain() {
	defer close(f.ended)
	_, _ = io.Copy(io.Discard, f.conn)
}

// outcome returns "closed" if the server closes the connection within 1 s of the last frame, otherwise "open".
func (f *framer) outcome(ctx context.Context) string {
	select {
	case <-f.ended:
		if ctx.Err() == nil {
			return closed
		}
	case <-ctx.Done():
	case <-time.After(time.Second):
	}
	return "open"
}

// framed returns a shape that runs f on n HTTP/2 connections.
func framed(name, about string, n int, within time.Duration, drained bool,
	f func(ctx context.Context, c *framer) error, settings ...http2.Setting,
) *shape {
	return raw(name, about, n, within, "h2", func(ctx context.Context, a *attempt, _ int, c net.Conn) string {
		fr, err := newFramer(a, c, settings...)
		if err != nil {
			return failed(err)
		}
		if drained {
			go fr.drain()
		}
		_ = f(ctx, fr) // a failed write means that the connection has ended
		return fr.outcome(ctx)
	})
}

// repeated calls f n times, until it fails or the context ends.
func repeated(ctx context.Context, n int, f func(i int) error) error {
	for i := range n {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err := f(i); err != nil {
			return err
		}
	}
	return nil
}

func stream(i int) uint32 { return uint32(2*i + 1) }

func frames() []*shape {
	// A server may close the connection at some point, which depends on its speed.
	resets := func(name string, as sender, path string) *shape {
		about := "2,000 on each of two connections"
		return raw(name, about, 2, longest, "h2", func(ctx context.Context, a *attempt, _ int, c net.Conn) string {
			f, err := newFramer(a, c)
			if err != nil {
				return failed(err)
			}
			go f.drain()
			_ = repeated(ctx, 2000, func(i int) error {
				if err := f.request(stream(i), as, "GET", path, true); err != nil {
					return err
				}
				return f.WriteRSTStream(stream(i), http2.ErrCodeCancel)
			})
			_ = lifecycle.Sleep(ctx, time.Second)
			return "sent"
		})
	}
	window := http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1}
	large := func(s *shape) *shape {
		s.setup = func(a *attempt) error { return populate(a, 100, 200_000) }
		return s
	}
	return []*shape{
		resets("rapid resets of lists", tenant, configMaps),
		resets("rapid resets of watches", tenant, configMaps+"?watch=1"),
		framed("a flood of 200,000 settings", "", 1, longest, true, func(ctx context.Context, c *framer) error {
			_ = repeated(ctx, 200_000, func(int) error {
				return c.WriteSettings(http2.Setting{ID: http2.SettingMaxFrameSize, Val: 16384})
			})
			return nil
		}),
		framed("a flood of 200,000 settings whose answers are not read", "", 1, 8*time.Second, false,
			func(ctx context.Context, c *framer) error {
				_ = repeated(ctx, 200_000, func(int) error { return c.WriteSettings() })
				return nil
			}),
		framed("a flood of 200,000 pings", "", 1, longest, true, func(ctx context.Context, c *framer) error {
			_ = repeated(ctx, 200_000, func(i int) error { return c.WritePing(false, [8]byte{byte(i)}) })
			return nil
		}),
		framed(
			"a flood of 200,000 empty DATA frames",
			"",
			1,
			longest,
			true,
			func(ctx context.Context, c *framer) error {
				_ = c.request(1, tenant, "POST", configMaps, false)
				_ = repeated(ctx, 200_000, func(int) error { return c.WriteData(1, false, nil) })
				return nil
			},
		),
		framed(
			"a flood of 100,000 CONTINUATION frames",
			"",
			2,
			longest,
			true,
			func(ctx context.Context, c *framer) error {
				_ = c.WriteHeaders(
					http2.HeadersFrameParam{StreamID: 1, BlockFragment: c.headers(anonymous, "GET", "/api")},
				)
				_ = repeated(ctx, 100_000, func(i int) error {
					return c.WriteContinuation(
						1,
						false,
						bytes.Clone(c.headers(anonymous, "GET", "/", fmt.Sprintf("x%d", i), "y")),
					)
				})
				return nil
			},
		),
		framed("headers of HPACK's table", "100 requests that name an entry of 3 kB 10,000 times", 1, longest, true,
			func(ctx context.Context, c *framer) error {
				return repeated(ctx, 100, func(i int) error {
					b := bytes.Clone(c.headers(anonymous, "GET", "/api", "x-large", strings.Repeat("a", 3000)))
					b = append(b, bytes.Repeat([]byte{0xbe}, 10_000)...) // index 62, the newest entry
					return c.WriteHeaders(
						http2.HeadersFrameParam{
							StreamID:      stream(i),
							BlockFragment: b,
							EndStream:     true,
							EndHeaders:    true,
						},
					)
				})
			}),
		large(framed("a window of one byte", "100 lists of 20 MB on one connection, for 6 s", 1, 6*time.Second, true,
			func(ctx context.Context, c *framer) error {
				for i := range 100 {
					if err := c.request(stream(i), tenant, "GET", configMaps, true); err != nil {
						return err
					}
				}
				<-ctx.Done()
				return nil
			}, window)),
		large(framed("a window that grows byte by byte", "2 lists of 20 MB, 20,000 WINDOW_UPDATE frames, for 6 s", 1,
			6*time.Second, true, func(ctx context.Context, c *framer) error {
				for i := range 2 {
					_ = c.request(stream(i), tenant, "GET", configMaps, true)
				}
				_ = repeated(ctx, 20_000, func(i int) error { return c.WriteWindowUpdate(stream(i%2), 1) })
				<-ctx.Done()
				return nil
			}, window)),
		large(
			framed(
				"answers that are not read",
				"10 lists of 20 MB on each of 10 connections, for 6 s",
				10,
				6*time.Second,
				false,
				func(ctx context.Context, c *framer) error {
					_ = c.WriteWindowUpdate(0, 1<<30)
					for i := range 10 {
						_ = c.request(stream(i), tenant, "GET", configMaps, true)
					}
					<-ctx.Done()
					return nil
				},
				http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 30},
			),
		),
		framed("1,000 streams with bodies that never come", "on one connection, for 6 s", 1, 6*time.Second, true,
			func(ctx context.Context, c *framer) error {
				_ = repeated(
					ctx,
					1000,
					func(i int) error { return c.request(stream(i), tenant, "POST", configMaps, false) },
				)
				<-ctx.Done()
				return nil
			}),
	}
}
