package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"encoding/pem"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
)

// backend is a TLS server on loopback that a shape starts: a webhook, an aggregated API server, or a kubelet.
type backend struct {
	*httptest.Server
	// bundle is its certificate in PEM.
	bundle []byte
}

// serve starts a backend with a self-signed certificate.
func (a *attempt) serve(h http.HandlerFunc) (*backend, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	cert, err := selfSigned(key, &key.PublicKey, nil, []string{"localhost"})
	if err != nil {
		return nil, err
	}
	return a.serveAs(cert, h), nil
}

// serveAs starts a backend until the shape ends. Its connections and handlers end with the shape.
func (a *attempt) serveAs(cert tls.Certificate, h http.HandlerFunc) *backend {
	ctx, cancel := context.WithCancel(context.Background())
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, stop := context.WithCancel(r.Context())
		defer stop()
		defer context.AfterFunc(ctx, stop)()
		h(w, r.WithContext(body))
	}))
	s.TLS = &tls.Config{Certificates: []tls.Certificate{cert}}
	s.EnableHTTP2 = true
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.StartTLS()
	a.closers = append(a.closers, func() {
		cancel()
		s.CloseClientConnections()
		s.Close()
	})
	return &backend{s, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Certificate[0]})}
}

// hang keeps a request open until its client leaves or the shape ends.
func hang(_ http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body)
	<-r.Context().Done()
}

// pour writes a text n times, or until the client leaves.
func pour(w io.Writer, text string, n int) {
	for range n {
		if _, err := io.WriteString(w, text); err != nil {
			return
		}
	}
}
