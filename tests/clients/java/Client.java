// The JDK's own HTTP client with its defaults, which offers HTTP/2 with its first request: java Client.java URL KEY MODEL

import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;

public class Client {
    static String url, key, model;

    public static void main(String[] arguments) throws Exception {
        url = arguments[0];
        key = arguments[1];
        model = arguments[2];
        HttpClient client = HttpClient.newHttpClient();
        for (int turn = 0; turn < 3; turn++) {
            expect(client, "hello " + turn, false, "\"content\":\"hello " + turn + "\"");
            expect(client, "hello", true, "data: [DONE]");
        }
        // Longer than what fits into one read, so that it comes in pieces behind the head.
        expect(client, "hello" + " ".repeat(400_000), false, "context_length_exceeded");
        expect(HttpClient.newHttpClient(), "hello" + " ".repeat(400_000), false, "context_length_exceeded");
        System.out.println("all as expected");
    }

    static void expect(HttpClient client, String text, boolean stream, String words) throws Exception {
        String body = "{\"model\": \"" + model + "\", \"stream\": " + stream
            + ", \"messages\": [{\"role\": \"user\", \"content\": \"" + text + "\"}]}";
        HttpRequest request = HttpRequest.newBuilder(URI.create(url + "/v1/chat/completions"))
            .header("Content-Type", "application/json")
            .header("Authorization", "Bearer " + key)
            .POST(HttpRequest.BodyPublishers.ofString(body))
            .build();
        HttpResponse<String> answer = client.send(request, HttpResponse.BodyHandlers.ofString());
        if (!answer.body().contains(words)) {
            throw new AssertionError(answer.statusCode() + " " + answer.body());
        }
    }
}
