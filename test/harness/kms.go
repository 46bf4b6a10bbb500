package harness

import (
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"k8s.io/kms/pkg/service"
)

// KMS is a KMS v2 plugin inside the test's process. It encrypts with AES-GCM.
type KMS struct {
	// Endpoint is the plugin's socket, in the form that an EncryptionConfiguration takes.
	Endpoint string

	server *service.GRPCService
	mu     sync.Mutex
	keys   map[string]cipher.AEAD
	now    string
	broken string
}

// NewKMS starts a plugin with one key.
func NewKMS(t testing.TB) *KMS {
	t.Helper()
	k := &KMS{keys: map[string]cipher.AEAD{}}
	k.Rotate(t, "key-1")
	socket := filepath.Join(TempDir(t), "kms.sock")
	k.Endpoint = "unix://" + socket
	k.server = service.NewGRPCService(socket, 5*time.Second, k)
	go func() { _ = k.server.ListenAndServe() }()
	t.Cleanup(k.server.Close)
	return k
}

// Rotate makes the plugin encrypt with a new key. It still decrypts with the earlier keys.
func (k *KMS) Rotate(t testing.TB, id string) {
	t.Helper()
	raw := make([]byte, 32)
	_, _ = rand.Read(raw)
	block, err := aes.NewCipher(raw)
	if err != nil {
		t.Fatal(err)
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		t.Fatal(err)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.keys[id], k.now = aead, id
}

// Break makes the plugin fail with a reason, "hang" or "garbage". An empty reason makes it work again.
func (k *KMS) Break(reason string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.broken = reason
}

func (k *KMS) state(ctx context.Context) (id string, aead cipher.AEAD, err error) {
	k.mu.Lock()
	broken, id := k.broken, k.now
	aead = k.keys[id]
	k.mu.Unlock()
	switch broken {
	case "":
		return id, aead, nil
	case "hang":
		<-ctx.Done()
	}
	return id, aead, errors.New("the plugin is broken: " + broken)
}

// Status implements service.Service.
func (k *KMS) Status(ctx context.Context) (*service.StatusResponse, error) {
	id, _, err := k.state(ctx)
	return &service.StatusResponse{Version: "v2", Healthz: "ok", KeyID: id}, err
}

// Encrypt implements service.Service.
func (k *KMS) Encrypt(ctx context.Context, _ string, data []byte) (*service.EncryptResponse, error) {
	id, aead, err := k.state(ctx)
	if err != nil {
		return nil, err
	}
	nonce := make([]byte, aead.NonceSize())
	_, _ = rand.Read(nonce)
	return &service.EncryptResponse{Ciphertext: aead.Seal(nonce, nonce, data, nil), KeyID: id}, nil
}

// Decrypt implements service.Service.
func (k *KMS) Decrypt(ctx context.Context, _ string, r *service.DecryptRequest) ([]byte, error) {
	if _, _, err := k.state(ctx); err != nil {
		return nil, err
	}
	k.mu.Lock()
	aead := k.keys[r.KeyID]
	k.mu.Unlock()
	if aead == nil || len(r.Ciphertext) < aead.NonceSize() {
		return nil, fmt.Errorf("there is no key %q", r.KeyID)
	}
	n := aead.NonceSize()
	return aead.Open(nil, r.Ciphertext[:n], r.Ciphertext[n:], nil)
}
