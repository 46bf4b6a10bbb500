package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"time"
)

// selfSigned returns a certificate of a key, with organizations and names.
func selfSigned(key any, public any, organizations, names []string) (tls.Certificate, error) {
	template := &x509.Certificate{
		SerialNumber:          big.NewInt(time.Now().UnixNano()),
		Subject:               pkix.Name{CommonName: "cost", Organization: organizations},
		NotBefore:             time.Now().Add(-time.Hour),
		NotAfter:              time.Now().Add(time.Hour),
		DNSNames:              names,
		IPAddresses:           []net.IP{net.IPv4(127, 0, 0, 1)},
		IsCA:                  true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, public, key)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, err
}

// certificates returns a shape that presents client certificates of unusual sizes, which no CA signed.
func certificates() *shape {
	return &shape{
		name:  "client certificates of odd size",
		about: "an RSA key of 4,096 bits, 4,000 organizations, a chain of 20; 20 handshakes each",
		run: func(ctx context.Context, a *attempt) {
			large, err := rsa.GenerateKey(rand.Reader, 4096)
			if err != nil {
				a.saw(err.Error())
				return
			}
			small, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
			if err != nil {
				a.saw(err.Error())
				return
			}
			odd := []tls.Certificate{}
			for _, sign := range []func() (tls.Certificate, error){
				func() (tls.Certificate, error) { return selfSigned(large, &large.PublicKey, nil, nil) },
				func() (tls.Certificate, error) {
					all := many(4000, func(i int) string { return fmt.Sprintf("o%d", i) })
					return selfSigned(small, &small.PublicKey, all, nil)
				},
				func() (tls.Certificate, error) {
					c, err := selfSigned(small, &small.PublicKey, nil, nil)
					for range 20 {
						c.Certificate = append(c.Certificate, c.Certificate[0])
					}
					return c, err
				},
			} {
				c, err := sign()
				if err != nil {
					a.saw(err.Error())
					return
				}
				odd = append(odd, c)
			}
			times(ctx, 60, 4, func(i int) {
				conf := a.s.tls("h2")
				conf.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
					return &odd[i%len(odd)], nil
				}
				c := &http.Client{Transport: &http.Transport{TLSClientConfig: conf, ForceAttemptHTTP2: true,
					DisableKeepAlives: true}}
				a.ask(ctx, request{method: http.MethodGet, path: "/api", client: c})
			})
		},
	}
}
