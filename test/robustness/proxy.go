package main

import (
	"io"
	"net"
	"sync"
	"time"
)

// proxy forwards TCP connections, until set changes its mode.
//
//	pass: forwards bytes
//	refuse: closes every connection, also new connections
//	hang: keeps connections open and holds their bytes
type proxy struct {
	listener net.Listener
	to       string

	mu     sync.Mutex
	mode   mode
	change chan struct{}
	conns  map[net.Conn]bool
}

type mode int

const (
	pass mode = iota
	refuse
	hang
)

func newProxy(to string) (*proxy, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &proxy{listener: l, to: to, change: make(chan struct{}), conns: map[net.Conn]bool{}}
	go p.accept()
	return p, nil
}

func (p *proxy) address() string { return p.listener.Addr().String() }

func (p *proxy) set(m mode) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mode = m
	close(p.change)
	p.change = make(chan struct{})
	if m == refuse {
		for c := range p.conns {
			c.Close()
		}
	}
}

func (p *proxy) now() (mode, chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mode, p.change
}

func (p *proxy) accept() {
	for {
		in, err := p.listener.Accept()
		if err != nil {
			return
		}
		go p.serve(in)
	}
}

func (p *proxy) serve(in net.Conn) {
	defer in.Close()
	if m, _ := p.now(); m == refuse {
		return
	}
	out, err := net.DialTimeout("tcp", p.to, 2*time.Second)
	if err != nil {
		return
	}
	defer out.Close()
	p.mu.Lock()
	p.conns[in], p.conns[out] = true, true
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		delete(p.conns, in)
		delete(p.conns, out)
		p.mu.Unlock()
	}()
	var wg sync.WaitGroup
	for _, d := range [][2]net.Conn{{in, out}, {out, in}} {
		wg.Go(func() {
			defer in.Close()
			defer out.Close()
			p.copy(d[1], d[0])
		})
	}
	wg.Wait()
}

// copy forwards bytes. While the link hangs, it holds them.
func (p *proxy) copy(to io.Writer, from io.Reader) {
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		if err != nil {
			return
		}
		for m, change := p.now(); m == hang; m, change = p.now() {
			<-change
		}
		if _, err := to.Write(buf[:n]); err != nil {
			return
		}
	}
}

func (p *proxy) close() {
	p.listener.Close()
	p.set(refuse)
}
